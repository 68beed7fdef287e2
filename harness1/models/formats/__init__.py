"""Chat formats: contexts to token ids, and sampled ids to actions."""
