"""Evaluation of finished episodes against gold: metrics, intervals, summaries of runs, and comparisons."""
