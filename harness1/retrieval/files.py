"""Files that are verified before their bytes are used: a CRC-32 for every block of 64 KiB.

The first block is verified when a file is opened, and with it all of a small file; every other block when it is first
read. A block that was found whole is not read for its checksum again, so what is verified costs nothing later.
"""

from __future__ import annotations

import io
import mmap
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from harness1.errors import CorpusError
from harness1.records import Record

BITS = 16
BLOCK = 1 << BITS
"""Bytes that share a checksum. A file of no more is read when opened instead of mapped, because every mapping holds an
open file, and a process may have only a few."""


class DamagedFile(CorpusError, ValueError):
    """A file whose bytes are not those that were written. When an index is opened or changed this is the user's error;
    in a search it is a fault, like any other `ValueError` from an engine."""


class Sums(Record):
    """The size of a file in bytes, and the CRC-32 of each of its blocks, 4 bytes each."""

    size: int
    blocks: bytes


def sums_of(path: Path, size: int | None = None) -> Sums:
    """Return the checksums of a file, or of its first `size` bytes."""
    data = _read(path, size)
    blocks = (zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    return Sums(len(data), array("I", blocks).tobytes())


def damaged_blocks(path: Path, sums: Sums, *, grows: bool = False) -> list[int]:
    """Return the numbers of all blocks of a file that are not as they were written.

    Args:
        grows: it may have become longer or shorter since; blocks that are gone count as damaged.

    Raises:
        DamagedFile: the size is wrong.
        OSError: there is no such file.
    """
    found = sums_of(path, sums.size if grows else None)
    if found.size != sums.size and not grows:
        raise _wrong_size(path, found.size, sums.size)
    pairs = zip_longest(array("I", found.blocks), array("I", sums.blocks))
    return [block for block, (one, other) in enumerate(pairs) if one != other]


class CheckedFile:
    """The bytes of a file.

    Args:
        sums: None for a file that has no checksums; it is believed.
        grows: it may have become longer since; only the bytes that have checksums are used.

    Raises:
        DamagedFile: the size or the first block is wrong.
        OSError: there is no such file.
    """

    def __init__(self, path: Path, sums: Sums | None = None, *, grows: bool = False) -> None:
        self.path = path
        self.bytes = _read(path, sums.size if sums and grows else None)
        if sums and len(self.bytes) != sums.size:
            raise _wrong_size(path, len(self.bytes), sums.size)
        self._sums = array("I", sums.blocks if sums else b"")
        self._new = bytearray(b"\1" * len(self._sums) or b"\0" * max(1, -(-len(self.bytes) // BLOCK)))
        self.check(0, 1)

    def check(self, start: int, stop: int) -> None:
        """Verify the blocks of a stretch of bytes that were not verified before.

        Raises:
            DamagedFile: one is not as it was written.
        """
        first, last = start >> BITS, ((stop - 1) >> BITS) + 1
        if self._new.find(1, first, last) >= 0:
            self._verify(range(first, min(last, len(self._new))))

    def check_all(self) -> None:
        """Verify the whole file, as `check` does."""
        self.check(0, len(self.bytes))

    def check_each(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Verify many stretches of bytes, which ascend, as `check` does; faster where most were verified before."""
        if not len(starts) or self._new.find(1, int(starts[0]) >> BITS, (int(stops[-1]) >> BITS) + 1) < 0:
            return
        new = np.frombuffer(self._new, np.uint8)
        first, last = starts >> BITS, np.maximum(stops - 1, 0) >> BITS
        if new[first].any() or new[last].any() or np.any(last - first > 1):
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                self.check(start, stop)

    def _verify(self, blocks: range) -> None:
        for block in blocks:
            if self._new[block]:
                part = self.bytes[block << BITS : (block + 1) << BITS]
                if zlib.crc32(part) != self._sums[block]:
                    first = block << BITS
                    raise DamagedFile(
                        f"{self.path} is damaged between byte {first} and {first + len(part) - 1}: see "
                        "`harness1 index check`, and build the index again with `harness1 index --force`"
                    )
                self._new[block] = 0


class CheckedArray:
    """An array in a `.npy` file, read-only. `values` may be used where `check` has verified them; `whole` verifies all.

    Raises:
        DamagedFile: the file holds no array.
    """

    def __init__(self, file: CheckedFile) -> None:
        self._file = file
        try:
            with io.BytesIO(file.bytes[:BLOCK]) as head:
                np.lib.format.read_magic(head)
                shape, _, dtype = np.lib.format.read_array_header_1_0(head)
                self._start = head.tell()
            flat = np.frombuffer(file.bytes, dtype, prod(shape), self._start)
        except ValueError as error:
            raise DamagedFile(f"{file.path} is damaged: {error}") from error
        self._item = dtype.itemsize
        self.values: NDArray[Any] = flat.reshape(shape)

    def check(self, start: int, stop: int) -> None:
        """Verify the items of a one-dimensional array from `start` to before `stop`.

        Raises:
            DamagedFile: they are not as they were written.
        """
        self._file.check(self._start + start * self._item, self._start + stop * self._item)

    def whole(self) -> NDArray[Any]:
        """Return the array, verified as a whole.

        Raises:
            DamagedFile: it is not as it was written.
        """
        self._file.check_all()
        return self.values


class Files:
    """The files of a folder.

    Args:
        sums: their checksums, by paths in the folder; files that it does not name are believed.
    """

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

    def array(self, name: str) -> CheckedArray:
        """Open an array, of which the first block is verified; errors as those of `CheckedArray`."""
        return CheckedArray(self.file(name))

    def load(self, name: str) -> NDArray[Any]:
        """Open an array and verify all of it; errors as those of `CheckedArray`."""
        return self.array(name).whole()


def _wrong_size(path: Path, found: int, written: int) -> DamagedFile:
    return DamagedFile(f"{path} is damaged: it has {found} bytes instead of {written}")


def _read(path: Path, size: int | None) -> memoryview:
    """Return the bytes of a file, or up to `size` of them: mapped, so that one copy in memory serves all processes."""
    with path.open("rb") as file:
        length = file.seek(0, io.SEEK_END)
        length = length if size is None else min(size, length)
        if length > BLOCK:
            return memoryview(mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ))
        file.seek(0)
        return memoryview(file.read(length))


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
