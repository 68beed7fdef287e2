"""Finding text: corpora, chunking, BM25, grep, and the one protocol behind which they stand."""
