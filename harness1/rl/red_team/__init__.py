"""Read episodes that earned much for tricks, with a language model as the judge."""
