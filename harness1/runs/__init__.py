"""The life of a run folder: its card, its episodes, its lock, and what may be written or cleared."""
