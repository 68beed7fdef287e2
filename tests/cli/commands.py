"""The command line in the process of a test."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

import pytest

from harness1.cli import main
from tests.support import hearing


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


def run_in(folder: Path, *arguments: str) -> None:
    """Run a command that succeeds in a folder: for what all tests of a file share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["harness1", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        assert not ended.value.code


def interrupted(*arguments: str, cwd: Path, record: Path, least: int, mark: str = "\n") -> tuple[int, str]:
    """Interrupt a command in a process of its own once it has written so many marks; its exit code and what it said."""
    command, pipes = [sys.executable, "-m", "harness1", *arguments], {"stdout": PIPE, "stderr": PIPE}
    with Popen(command, cwd=cwd, **pipes, text=True, preexec_fn=hearing()) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if record.is_file() and record.read_bytes().count(mark.encode()) >= least:  # a letter may be half written
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    return process.returncode, err
