"""Files of an index, which are verified before their bytes are used, and lists of strings in such files."""

from __future__ import annotations

import io
import mmap
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from harness1.errors import CorpusError
from harness1.records import Record

BLOCK = 1 << 16
"""Bytes that share a CRC-32. A file of no more is read when opened instead of mapped, because every mapping holds an
open file, and a process may have only a few."""


class DamagedFile(CorpusError, ValueError):
    """A file whose bytes are not those that were written: the user's error when an index is opened or changed, and a
    fault in a search, like any other `ValueError`."""


class Sums(Record):
    """The checksum of a file: its size in bytes, and the CRC-32 of each of its blocks, 4 bytes each."""

    size: int
    blocks: bytes

    @classmethod
    def of(cls, data: memoryview) -> Sums:
        """Return the checksum of some bytes."""
        blocks = array("I", (zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)))
        return cls(len(data), blocks.tobytes())


class CheckedFile:
    """The bytes of a file, mapped if large, so that one copy serves all processes. A small file is verified when it is
    opened, a block of another when it is first used. Without `sums` it is believed; one that `grows` may be longer than
    its sums. Raises DamagedFile: the size is wrong, or it is small and damaged; OSError."""

    def __init__(self, path: Path, sums: Sums | None = None, *, grows: bool = False) -> None:
        self._path = path
        with path.open("rb") as file:
            self.size = file.seek(0, io.SEEK_END)
            if sums and grows:
                self.size = min(self.size, sums.size)
            if self.size > BLOCK:
                self._data = memoryview(mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ))
            else:
                file.seek(0)
                self._data = memoryview(file.read(self.size))
        if sums and self.size != sums.size:
            raise DamagedFile(f"{path} is damaged: it has {self.size} bytes instead of {sums.size}")
        self._sums = memoryview(sums.blocks if sums else b"").cast("I")
        self._unverified = set(range(len(self._sums)))
        if self.size <= BLOCK:
            self.part(0, self.size)

    @cached_property
    def bytes(self) -> memoryview:
        """All bytes. Raises DamagedFile: they are not as they were written."""
        return self.part(0, self.size)

    def part(self, start: int, stop: int) -> memoryview:
        """Return some of the bytes; only the blocks that hold them are verified, once. Raises DamagedFile."""
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            if block in self._unverified:
                if zlib.crc32(self._data[block * BLOCK : (block + 1) * BLOCK]) != self._sums[block]:
                    advice = "see `harness1 index check`, and build the index again with `harness1 index --force`"
                    raise DamagedFile(f"{self._path} is damaged: {advice}")
                self._unverified.discard(block)
        return self._data[start:stop]

    @cached_property
    def array(self) -> NDArray[Any]:
        """The array in a `.npy` file, read-only; errors as those of `bytes`."""
        try:
            with io.BytesIO(self.bytes[:BLOCK]) as head:
                np.lib.format.read_magic(head)
                shape, _, dtype = np.lib.format.read_array_header_1_0(head)
                return np.frombuffer(self.bytes, dtype, prod(shape), head.tell()).reshape(shape)
        except DamagedFile:
            raise
        except ValueError as error:
            raise DamagedFile(f"{self._path} is damaged: {error}") from error


class Files:
    """The files of a folder, with their checksums by paths in it; files without any are believed."""

    def __init__(self, folder: Path, sums: Mapping[str, Sums] | None = None) -> None:
        self.folder = folder
        self.sums = sums or {}

    def below(self, name: str) -> Files:
        """Return the files of a folder in this one."""
        start = f"{name}/"
        inner = {path.removeprefix(start): sums for path, sums in self.sums.items() if path.startswith(start)}
        return Files(self.folder / name, inner)

    def file(self, name: str, *, grows: bool = False) -> CheckedFile:
        """Open a file; arguments and errors as those of `CheckedFile`."""
        return CheckedFile(self.folder / name, self.sums.get(name), grows=grows)

    def load(self, name: str) -> NDArray[Any]:
        """Open an array and verify it; errors as those of `CheckedFile`."""
        return self.file(name).array


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


class Strings:
    """A list of UTF-8 strings: all bytes one after the other in `NAME.bin`, and where each begins and the last one ends
    in `NAME.ends.npy`, [strings + 1]. Raises DamagedFile: they do not fit together."""

    def __init__(self, files: Files, name: str) -> None:
        self._file = files.file(f"{name}.bin")
        self.ends: NDArray[np.int64] = files.load(f"{name}.ends.npy")
        if self._file.size != self.ends[-1]:
            raise DamagedFile(f"{name}.bin has {self._file.size} bytes instead of {self.ends[-1]}")

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def bytes(self) -> memoryview:
        """The bytes of all strings."""
        return self._file.bytes

    def view(self, position: int) -> memoryview:
        """Return the bytes of one string without copying them; only their part of the file is verified."""
        return self._file.part(int(self.ends[position]), int(self.ends[position + 1]))

    def __getitem__(self, position: int) -> str:
        return str(self.view(position), "utf-8")


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


class Keys(Strings):
    """Distinct strings that can be looked up by value: with the CRC-32 of every string, sorted, in `NAME.sums.npy`, and
    the positions of the strings in that order in `NAME.slots.npy`."""

    def __init__(self, files: Files, name: str) -> None:
        super().__init__(files, name)
        self._sums, self._slots = files.file(f"{name}.sums.npy"), files.file(f"{name}.slots.npy")

    def find(self, values: Iterable[str]) -> list[int]:
        """Return the position of each string, -1 if the list lacks it."""
        encoded = [value.encode("utf-8", "surrogatepass") for value in values]
        if not encoded or not len(self):
            return [-1] * len(encoded)
        blob, all_sums, slots = self.bytes, self._sums.array, self._slots.array
        sums = np.fromiter(map(zlib.crc32, encoded), np.uint32, len(encoded))
        first = np.searchsorted(all_sums, sums)
        likely = slots[np.minimum(first, len(self) - 1)]
        bounds = zip(self.ends[likely].tolist(), self.ends[likely + 1].tolist(), strict=True)
        return [
            position if blob[begin:end] == value else self._match(value, place)
            for value, position, (begin, end), place in zip(
                encoded, likely.tolist(), bounds, first.tolist(), strict=True
            )
        ]

    def _match(self, value: bytes, at: int) -> int:
        sums, slots = self._sums.array, self._slots.array
        while at < len(sums) and sums[at] == zlib.crc32(value):
            position = int(slots[at])
            if self.view(position) == value:
                return position
            at += 1
        return -1
