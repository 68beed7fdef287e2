"""Property tests draw the same examples in every run: what is green stays green until the code changes. Only the attack
(`tests/attack`) draws others, by the seed it is given."""

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attack")
    group.addoption("--attack-seed", type=int, default=0, help="seed of everything that the attack draws")
    group.addoption("--attack-scale", type=float, default=0.1, help="share of the full number of inputs")
