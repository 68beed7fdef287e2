"""Lists of strings on disk that open instantly at any size: memory-mapped, with lookup by value.

A list NAME is a file of all bytes, `NAME.bin`, and the ends of its strings, `NAME.ends.npy`. `Keys` adds the CRC-32 of
every string, sorted, in `NAME.sums.npy`, and the positions of the strings in that order, in `NAME.slots.npy`.
"""

from __future__ import annotations

import mmap
import zlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

SMALL = 1 << 16
"""Largest size in bytes of a file that is read when opened instead of mapped."""


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

    `bytes` holds them one after the other, `ends` [strings + 1] says where each begins and the last one ends.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.ends = load_array(folder / f"{name}.ends.npy")
        with (folder / f"{name}.bin").open("rb") as file:
            large = self.ends[-1] > SMALL
            self.bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if large else file.read())
        if len(self.bytes) != self.ends[-1]:
            raise ValueError(f"{name}.bin has {len(self.bytes)} bytes instead of {self.ends[-1]}")

    def __len__(self) -> int:
        return len(self.ends) - 1

    def view(self, position: int) -> memoryview:
        """Return the bytes of one string without copying them."""
        return self.bytes[self.ends[position] : self.ends[position + 1]]

    def __getitem__(self, position: int) -> str:
        return str(self.view(position), "utf-8")


class Keys(Strings):
    """A list of distinct strings that can be looked up by value."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self._sums = load_array(folder / f"{name}.sums.npy")
        self._slots = load_array(folder / f"{name}.slots.npy")

    def find(self, values: Iterable[str]) -> list[int]:
        """Return the position of each string, -1 if the list lacks it."""
        encoded = [value.encode("utf-8", "surrogatepass") for value in values]
        if not encoded or not len(self):
            return [-1] * len(encoded)
        sums = np.fromiter(map(zlib.crc32, encoded), np.uint32, len(encoded))
        first = np.searchsorted(self._sums, sums)
        likely = self._slots[np.minimum(first, len(self) - 1)]
        bounds = zip(self.ends[likely].tolist(), self.ends[likely + 1].tolist(), strict=True)
        blob = self.bytes
        return [
            position if blob[begin:end] == value else self._match(value, place)
            for value, position, (begin, end), place in zip(
                encoded, likely.tolist(), bounds, first.tolist(), strict=True
            )
        ]

    def _match(self, value: bytes, at: int) -> int:
        """Compare with all strings that share a sum, from the first on."""
        sum_ = zlib.crc32(value)
        while at < len(self._sums) and self._sums[at] == sum_:
            position = int(self._slots[at])
            if self.view(position) == value:
                return position
            at += 1
        return -1


def load_array(path: Path) -> NDArray[Any]:
    """Open an array from a `.npy` file, read-only: memory-mapped, as a plain `ndarray` (slices of a memmap are slow).

    A small one is read, because every mapping holds an open file, and a process may have only a few.
    """
    if path.stat().st_size > SMALL:
        return np.asarray(np.load(path, mmap_mode="r"))
    array: NDArray[Any] = np.load(path)
    array.flags.writeable = False
    return array
