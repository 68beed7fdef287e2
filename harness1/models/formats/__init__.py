"""Chat formats: how contexts become token ids, and how sampled ids become actions. One file each."""
