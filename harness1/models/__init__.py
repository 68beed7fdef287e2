"""Language models: backends that sample tokens, tokenizers, chat formats, and models as files."""
