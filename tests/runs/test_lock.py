"""One process at a time holds a lock, and a killed process holds none."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness1.errors import UsageError
from harness1.runs.files import lock, lock_or_wait


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """Another process that holds the lock of a file, until it is killed."""
    ready, locked = os.pipe()
    child = os.fork()
    if not child:
        file = (tmp_path / "lock").open("w")
        lock(file, "held")
        os.write(locked, b"x")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_held_lock_is_refused_in_the_words_of_the_caller(tmp_path: Path, holder: int) -> None:
    with (tmp_path / "lock").open("w") as file, pytest.raises(UsageError, match="somebody builds here"):
        lock(file, "somebody builds here")


def test_who_waits_says_so_first_and_gets_the_lock_of_a_killed_process(tmp_path: Path, holder: int) -> None:
    said, got = threading.Event(), threading.Event()

    def wait() -> None:
        with (tmp_path / "lock").open("w") as file:
            lock_or_wait(file, said.set)
            got.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert said.wait(10)
    assert not got.is_set()
    os.kill(holder, signal.SIGKILL)
    waiting.join(10)
    assert got.is_set()


def test_a_lock_is_free_when_its_file_is_closed(tmp_path: Path) -> None:
    said = threading.Event()
    for _ in range(2):
        with (tmp_path / "lock").open("w") as file:
            lock_or_wait(file, said.set)
    assert not said.is_set()
