"""The command line in the process of a test."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
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


def harness1(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `harness1` in a folder, as a process of its own would end; nothing of it is a terminal."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["harness1", *arguments])
        try:
            main.run()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
