"""Tasks made from any corpus: questions with gold, over the names that its documents share."""
