"""Answers of a frozen model from the delivered documents."""
