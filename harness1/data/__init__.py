"""Corpora and tasks: readers and writers of the common layouts, and corpora that need no download."""
