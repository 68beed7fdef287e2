"""The package that verifiers loads by its id: `harness1_verifiers`."""

from harness1.adapters.verifiers_env import SearchHarness, SearchTaskset

__all__ = ["SearchHarness", "SearchTaskset"]
