"""Locks on open files. The system frees one when its file is closed or its process dies, however it dies."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from typing import IO, Any

from harness1.errors import UsageError


def lock(file: IO[Any], refusal: str) -> None:
    """Lock a file against all other processes, or refuse at once.

    Raises:
        UsageError: another process holds the lock; `refusal` is the message.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(refusal) from error


def lock_or_wait(file: IO[Any], on_wait: Callable[[], None]) -> None:
    """Lock a file against all other processes; call `on_wait` before waiting for one that holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)
