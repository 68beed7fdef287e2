"""Models as files: where they come from, and what they hold."""
