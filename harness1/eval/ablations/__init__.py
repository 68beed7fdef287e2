"""Ablations: the same policy without one mechanism at a time."""
