"""The order and the tiers of the tests, and the examples that properties draw.

Property tests draw the same examples in every run: what is green stays green until the code changes. `make nightly`
draws others, and more of them; the attack (`tests/attack`) by the seed it is given.
"""

import shutil

import pytest
from hypothesis import settings

TIERS = ("service", "attack", "ray", "docs", "browser", "training")
"""What `make test` leaves to `make test-all`."""
FIRST = (
    *("test_micro_learning.py", "test_wheel.py", "test_tiny.py", "test_notebooks.py", "test_run.py", "test_kills.py"),
    *("test_browser.py", "test_trl_trainer.py", "test_memory_plan.py", "test_fine_tuning.py"),
    *("test_learning.py", "test_sft_commands.py", "test_retrieval_models.py", "test_trainer.py"),
    *("test_train_plan.py", "test_attention.py", "test_contract.py", "test_building.py", "test_own_code.py"),
    *("test_fine_tuning_on_a_service.py", "test_cli.py", "test_pivots.py", "test_tinker_engine.py", "test_bm25.py"),
)
"""The files that take longest, the longest first: two processes that take a file each end together."""

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("nightly", deadline=None, max_examples=500)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat what failed at once."""
    monkeypatch.setattr("harness1.http.client.BACKOFF_S", 0.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attack")
    group.addoption("--attack-seed", type=int, default=0, help="seed of everything that the attack draws")
    group.addoption("--attack-scale", type=float, default=0.1, help="share of the full number of inputs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tiers, skip what cannot run here, and put the slow files first."""
    chromium = shutil.which("chromium") is not None
    for item in items:
        if any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker("slow")
        if item.get_closest_marker("browser") and not chromium:
            item.add_marker(pytest.mark.skip(reason="there is no browser: apt-get install chromium"))
    place = {name: at for at, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))
