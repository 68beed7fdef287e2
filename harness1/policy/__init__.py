"""Policies, which choose the next action from a context."""
