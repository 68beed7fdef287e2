"""BM25 over the segments of an index."""
