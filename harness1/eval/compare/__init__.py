"""Runs beside each other on the same tasks."""
