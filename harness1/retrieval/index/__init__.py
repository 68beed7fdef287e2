"""The embedded index: segments, generations, building, and the retriever over them."""
