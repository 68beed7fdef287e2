"""Exports to the formats of other projects."""
