"""Evaluation of finished episodes against gold: metrics, intervals, summaries of runs, and comparisons."""

from typing import Literal

Faults = Literal["exclude", "zero"]
"""How an episode that the infrastructure broke counts in means: not at all, or as one that found nothing."""
