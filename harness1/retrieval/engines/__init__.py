"""Retrievers other than the embedded index: the web, and remote servers."""
