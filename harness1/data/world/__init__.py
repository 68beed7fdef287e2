"""Synthetic worlds: corpora with known evidence at any size, generated without data."""
