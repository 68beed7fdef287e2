"""Property tests draw the same examples in every run: what is green stays green until the code changes."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
