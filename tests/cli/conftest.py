"""The command line in the process of a test, in a working folder."""

from pathlib import Path

import pytest

from tests.cli.commands import Command, command_in_process


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The working folder, of a test of its own; a file may have one for all of its tests."""
    return tmp_path


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> Command:
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "200")
    return command_in_process(monkeypatch, capsys)
