"""Language models that are asked by token ids over HTTP, or in an engine's processes."""
