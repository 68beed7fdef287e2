"""The command line: one file for each verb, thin shells over the library."""
