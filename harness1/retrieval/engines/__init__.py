"""Retrievers other than the embedded index: Milvus, Chroma, the web, and remote servers."""
