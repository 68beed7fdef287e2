"""Files that are written whole or not at all, and what goes wrong with folders and disks."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from harness1.errors import UsageError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Work inside this where every `OSError` is of the folder or of what the user named.

    Raises:
        UsageError: the folder cannot be written, or its disk is full.
    """
    try:
        yield
    except OSError as error:
        reason = "no space left on its disk" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UsageError(f"{error.filename or folder}: {reason}") from error


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Look whether the disk of a folder, which need not exist yet, has room for so many bytes.

    Raises:
        UsageError: it has not.
    """
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UsageError(f"no space left for {folder}: it takes about {needed / 1e6:,.0f} MB of {free / 1e6:,.0f} free")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader, or a crash, finds the old bytes or the new ones and nothing between."""
    with replacing(path) as file:
        file.write(data)


def write_json(path: Path, value: object) -> None:
    """Replace a file by a value as indented JSON, as `write_atomically` does."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` in one step once it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
