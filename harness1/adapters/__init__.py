"""Shapes that other projects take."""
