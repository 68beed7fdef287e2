"""Training rows: the calls that they are made of, merging, and their file."""
