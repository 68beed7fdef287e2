"""Comparison of runs on the same tasks."""
