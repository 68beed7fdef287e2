"""The command line: a file for each noun, thin shells over the library."""
