"""Policies: whatever decides the next action from a context."""
