"""Gives every test of the attack its seed and its size, and prints at the end what was tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack.attack import Attack
from tests.cli.commands import Command, command_in_process

_ATTACK = pytest.StashKey[Attack]()
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ATTACK] = Attack(config.getoption("--attack-seed"), config.getoption("--attack-scale"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.attack)


@pytest.fixture
def attack(request: pytest.FixtureRequest) -> Attack:
    return request.config.stash[_ATTACK]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    attack = config.stash[_ATTACK]
    if attack.counts:
        terminalreporter.section(f"attack with seed {attack.seed}, scale {attack.scale:g}")
        for name, counts in attack.counts.items():
            shown = ", ".join(f"{what.replace('_', ' ')} {count:,g}" for what, count in counts.items())
            terminalreporter.write_line(f"{name}: {shown}")
