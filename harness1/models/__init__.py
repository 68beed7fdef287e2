"""Small models that come from PyPI, for machines that reach no model hub."""
