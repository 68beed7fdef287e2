"""The benchmarks of the paper, one file each, read in their official formats."""
