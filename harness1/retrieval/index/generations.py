"""A folder of immutable generations, one of which the file CURRENT names.

    DIR/CURRENT          the name of the generation that readers open
    DIR/gen-000001/      one whole generation
    DIR/.build-*/        a running build, or the remains of an interrupted one

A generation is written in full, then renamed into place, then CURRENT is replaced. A reader that opens the folder sees
the earlier generation or the new one, never part of one. A reader that has an older generation mapped keeps it, even
when a later build deletes its files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness1.errors import CorpusError
from harness1.runs.files import lock

CURRENT = "CURRENT"
KEPT = 2
"""Generations that a build keeps: its own, and the one that readers may be about to open."""


def current_generation(path: Path) -> Path:
    """Return the folder of the current generation.

    Raises:
        CorpusError: there is no generation.
    """
    number = _current_number(path)
    if not number:
        raise CorpusError(f"{path} is not an index; build one there with: harness1 index")
    return path / _name(number)


@contextmanager
def new_generation(out: Path) -> Iterator[Path]:
    """Yield an empty folder for the next generation, which becomes current when the context ends without an error.

    Raises:
        CorpusError: the disk is full or the folder cannot be written. The earlier generation stays as it was.
        UsageError: another build is at work in the folder.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / ".lock").open("w") as file:
            lock(file, f"another build is at work in {out}")
            number = _current_number(out) + 1
            _remove_leftovers(out, number)
            work = Path(tempfile.mkdtemp(prefix=".build-", dir=out))
            try:
                yield work
                _publish(out, work, number)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            for old in range(number - KEPT, 0, -1):
                shutil.rmtree(out / _name(old), ignore_errors=True)
    except OSError as error:
        raise CorpusError(f"cannot build an index at {out}: {error}") from error


def _name(number: int) -> str:
    return f"gen-{number:06d}"


def _current_number(path: Path) -> int:
    """Return the number of the current generation, or 0 if there is none."""
    try:
        return int((path / CURRENT).read_text(encoding="utf-8").strip().removeprefix("gen-"))
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path / CURRENT} does not name a generation: delete {path} and build it anew") from error


def _remove_leftovers(out: Path, number: int) -> None:
    """Delete what interrupted builds left: work folders, and generations that never became current."""
    for folder in (*out.glob(".build-*"), out / _name(number)):
        if folder.exists():
            shutil.rmtree(folder)


def _publish(out: Path, work: Path, number: int) -> None:
    """Make a complete work folder the current generation. Every step is on the disk before the next begins."""
    for path in (*work.rglob("*"), work):
        _sync(path)
    work.chmod(0o755)
    work.rename(out / _name(number))
    _sync(out)
    pointer = out / f"{CURRENT}.new"
    pointer.write_text(f"{_name(number)}\n", encoding="utf-8")
    _sync(pointer)
    pointer.replace(out / CURRENT)
    _sync(out)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
