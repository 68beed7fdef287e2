"""Agents that are programs of their own as policies that learn: a command for each task, its calls, its reward."""
