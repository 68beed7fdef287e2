"""Retrieval: corpora, chunking, BM25, grep, embeddings, and the one protocol in front of them."""
