"""The same policy with one mechanism taken away at a time."""
