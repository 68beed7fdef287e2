"""Write files whole or not at all, lock them, and turn the errors of folders and disks into words.

The system frees a lock on an open file when the file is closed or its process dies, however it dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from harness1.errors import MALFORMED, SchemaError, UsageError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn every `OSError` inside this context into a `UsageError` that names the file or the folder.

    Raises:
        UsageError: the folder cannot be written, or its disk is full.
    """
    try:
        yield
    except OSError as error:
        reason = "no space left on its disk" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UsageError(f"{error.filename or folder}: {reason}") from error


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Refuse a folder, which need not exist yet, if its disk has fewer than `needed` bytes free.

    Raises:
        UsageError: the disk has too little room.
    """
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UsageError(f"no space left for {folder}: it takes about {needed / 1e6:,.0f} MB of {free / 1e6:,.0f} free")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that readers, even after a crash, find either the old bytes or the new ones."""
    with replacing(path) as file:
        file.write(data)


def write_json(path: Path, value: object) -> None:
    """Replace a file with a value as indented JSON, in one step."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON.

    Raises:
        SchemaError: it is no object, or no JSON.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except MALFORMED as error:
        raise SchemaError(f"{path} is damaged: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, which replaces `path` in one step once it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
