"""Search by embeddings, and models that read texts in pairs."""
