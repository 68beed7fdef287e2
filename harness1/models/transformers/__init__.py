"""A causal language model of transformers in this process."""
