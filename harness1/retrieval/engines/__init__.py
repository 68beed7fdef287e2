"""Retrievers beyond this machine's index: Milvus, Chroma, the web, and other servers."""
