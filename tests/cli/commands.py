"""The command line in the process of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from harness1.cli import main


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


def command_in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A function that runs `harness1` with some arguments, as a shell would."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["harness1", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run
