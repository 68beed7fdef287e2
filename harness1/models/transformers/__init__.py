"""A backend that runs a transformers causal language model in this process."""
