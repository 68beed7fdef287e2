"""Scoring finished episodes against gold: outcomes, metrics, intervals and the summary of a run."""
