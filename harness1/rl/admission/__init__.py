"""Decide which tasks are worth training on under a reward."""
