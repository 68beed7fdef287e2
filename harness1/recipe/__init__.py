"""Recipes: the chain from documents to an evaluated policy, with gates between the stages, and trials of settings."""
