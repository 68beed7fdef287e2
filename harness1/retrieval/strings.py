"""Lists of strings on disk that open instantly at any size: memory-mapped, with lookup by value.

A list NAME is a file of all bytes, `NAME.bin`, and the ends of its strings, `NAME.ends.npy`. `Keys` adds the CRC-32 of
every string, sorted, in `NAME.sums.npy`, and the positions of the strings in that order, in `NAME.slots.npy`.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from harness1.retrieval.checked import DamagedFile, Files


class StringWriter:
    """Appends strings to a new list, which is complete when the context ends."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ends_path = folder / f"{name}.ends.npy"
        self._ends = array("q", [0])
        self._file = (folder / f"{name}.bin").open("wb")

    def add(self, value: bytes) -> None:
        self._file.write(value)
        self._ends.append(self._ends[-1] + len(value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            np.save(self._ends_path, np.frombuffer(self._ends, dtype=np.int64))


def write_keys(folder: Path, name: str, values: Sequence[str]) -> None:
    """Write distinct strings as a list that `Keys` can search."""
    sums = np.empty(len(values), dtype=np.uint32)
    with StringWriter(folder, name) as writer:
        for position, value in enumerate(values):
            encoded = value.encode()
            sums[position] = zlib.crc32(encoded)
            writer.add(encoded)
    slots = np.argsort(sums, kind="stable").astype(np.int32)
    np.save(folder / f"{name}.sums.npy", sums[slots])
    np.save(folder / f"{name}.slots.npy", slots)


class Strings:
    """A list of UTF-8 strings on disk; one copy in memory serves all processes.

    `file.bytes` holds them one after the other; its stretches are to be checked before they are read, as `view` does.

    Raises:
        DamagedFile: the files do not fit together.
    """

    def __init__(self, files: Files, name: str) -> None:
        self.file = files.file(f"{name}.bin")
        self._ends = files.array(f"{name}.ends.npy")
        self._ends.check(len(self), len(self) + 1)
        self._bytes = self.file.bytes
        self._verified = bytearray(len(self))
        size = len(self._bytes)
        if size != self._ends.values[-1]:
            raise DamagedFile(f"{name}.bin has {size} bytes instead of {self._ends.values[-1]}")

    def __len__(self) -> int:
        return len(self._ends.values) - 1

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Where each string begins and the last one ends, [strings + 1]."""
        return self._ends.whole()

    def view(self, position: int) -> memoryview:
        """Return the bytes of one string without copying them."""
        if not self._verified[position]:
            self.file.check(*self.ends[position : position + 2].tolist())
            self._verified[position] = 1
        return self._bytes[self.ends[position] : self.ends[position + 1]]

    def __getitem__(self, position: int) -> str:
        return str(self.view(position), "utf-8")


class Keys(Strings):
    """A list of distinct strings that can be looked up by value; the first look verifies all of it."""

    def __init__(self, files: Files, name: str) -> None:
        super().__init__(files, name)
        self._sorted = files.array(f"{name}.sums.npy"), files.array(f"{name}.slots.npy")

    @cached_property
    def _lookup(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The sorted sums of the strings, and the position of the string of each. All strings are verified, too."""
        sums, slots = self._sorted
        self.file.check_all()
        return sums.whole(), slots.whole()

    def find(self, values: Iterable[str]) -> list[int]:
        """Return the position of each string, -1 if the list lacks it."""
        encoded = [value.encode("utf-8", "surrogatepass") for value in values]
        if not encoded or not len(self):
            return [-1] * len(encoded)
        sorted_sums, slots = self._lookup
        sums = np.fromiter(map(zlib.crc32, encoded), np.uint32, len(encoded))
        first = np.searchsorted(sorted_sums, sums)
        likely = slots[np.minimum(first, len(self) - 1)]
        bounds = zip(self.ends[likely].tolist(), self.ends[likely + 1].tolist(), strict=True)
        blob = self._bytes
        return [
            position if blob[begin:end] == value else self._match(value, place)
            for value, position, (begin, end), place in zip(
                encoded, likely.tolist(), bounds, first.tolist(), strict=True
            )
        ]

    def _match(self, value: bytes, at: int) -> int:
        """Compare with all strings that share a sum, from the first on."""
        sum_ = zlib.crc32(value)
        sums, slots = self._lookup
        while at < len(sums) and sums[at] == sum_:
            position = int(slots[at])
            if self.view(position) == value:
                return position
            at += 1
        return -1
