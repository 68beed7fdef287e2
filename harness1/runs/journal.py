"""A file of lines that only grows, and an optional binary file beside it for the numbers of each line.

The numbers of a line are written before it, so that a line never refers to missing numbers. A torn last line, left
by a crash, is cut off when the journal is opened for writing and skipped when it is read.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Self

import numpy as np

from harness1.errors import SchemaError, UsageError
from harness1.records import TokenBlob
from harness1.runs.files import lock

BLOCK = 1 << 16
"""Bytes that are read at a time to find the end of the last line."""


class Journal:
    """Appends to the two files of a folder; one process at a time holds them. The context closes them.

    Args:
        numbers: the name of the binary file; empty where lines have no numbers.

    Attributes:
        torn: bytes of a torn last line that were cut off on opening.

    Raises:
        UsageError: another process is writing to the folder, or this one cannot.
    """

    def __init__(self, folder: Path, lines: str, numbers: str = "") -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = (folder / lines).open("ab+")
        except OSError as error:
            raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
        refusal = f"{folder} is being written by another process"
        try:
            lock(self._lines, refusal)
            if os.fstat(self._lines.fileno()).st_ino != (folder / lines).stat().st_ino:  # it has just been replaced
                raise UsageError(refusal)
        except (UsageError, FileNotFoundError) as error:
            self._lines.close()
            raise UsageError(refusal) from error
        self._numbers = (folder / numbers).open("ab") if numbers else None
        self.torn = self._cut_torn_line()

    @property
    def offset(self) -> int:
        """Return where the next numbers will begin, in bytes."""
        return self._numbers.tell() if self._numbers else 0

    def write(self, line: bytes, numbers: bytes = b"") -> None:
        """Write one line and its numbers; both are on disk when this returns, as far as the operating system is
        concerned."""
        if numbers and self._numbers:
            self._numbers.write(numbers)
            self._numbers.flush()
        self._lines.write(line + b"\n")
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
        if self._numbers:
            self._numbers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut_torn_line(self) -> int:
        """Cut off what follows the last newline, which is looked for from the end, block by block."""
        size = end = self._lines.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - BLOCK)
            self._lines.seek(start)
            found = self._lines.read(end - start).rfind(b"\n") + 1
            end = start + found
            if found:
                break
        self._lines.truncate(end)
        self._lines.seek(end)
        return size - end


def held(folder: Path, lines: str) -> AbstractContextManager[object]:
    """Return a context that keeps other processes away from a folder's journal, if there is one.

    Raises:
        UsageError: as `Journal`.
    """
    return Journal(folder, lines) if (folder / lines).is_file() else nullcontext()


def read_lines(path: Path, on_torn: Callable[[int], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a journal with their numbers, from 1.

    Args:
        on_torn: called with its size in bytes if the last line is torn; it is left out.

    Raises:
        UsageError: there is no such file.
    """
    if not path.is_file():
        raise UsageError(f"{path.parent} holds no {path.name}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                if on_torn is not None:
                    on_torn(len(line))
                return
            yield number, line


def to_bytes(arrays: Sequence[np.ndarray], offset: int) -> tuple[bytes, TokenBlob | None]:
    """Return arrays of four-byte numbers as bytes, and how to find them in the file again; None for no numbers."""
    blob = b"".join(array.tobytes() for array in arrays)
    if not blob:
        return blob, None
    return blob, TokenBlob(offset, len(blob), zlib.crc32(blob), tuple(map(len, arrays)))


def unpacked(path: Path, place: TokenBlob, of: str) -> Iterator[np.ndarray]:
    """Yield the arrays again, as untyped words of four bytes; `view` gives them their type.

    Args:
        of: names what they belong to, in the error.

    Raises:
        SchemaError: the file is missing, or not what was written.
    """
    if not path.is_file():
        raise SchemaError(f"{path.name}, which holds its tokens, is missing")
    with path.open("rb") as numbers:
        numbers.seek(place.offset)
        blob = numbers.read(place.size)
    if zlib.crc32(blob) != place.crc32:
        raise SchemaError(f"the tokens of {of} are damaged")
    words, start = np.frombuffer(blob, dtype="<u4"), 0
    for count in place.counts:
        yield words[start : start + count]
        start += count
