"""Training rows: the recorded calls that they are made of, merging, and their file format."""
