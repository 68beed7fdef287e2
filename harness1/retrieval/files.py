"""The files of an index: a folder of immutable generations, one of which the file CURRENT names; their checksums, which
are verified before bytes are used; and lists of strings in such files.

    DIR/CURRENT                the name of the generation that readers open, and the CRC-32 of that name
    DIR/gen-000001/            one whole generation
    DIR/gen-000001/checksums   of every file in it and of the embeddings that it uses, and of these checksums (4 bytes)
    DIR/vectors/               embeddings, which all generations share
    DIR/.build-*/              a running build, or the remains of an interrupted one

A generation is written in full, then renamed into place, then CURRENT is replaced, so a reader never sees part of one,
and keeps the one that it has mapped. An index built before there were checksums is believed until it is changed."""

from __future__ import annotations

import io
import mmap
import os
import re
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness1.errors import CorpusError
from harness1.records import Record
from harness1.runs.files import lock

CURRENT, CHECKSUMS, MANIFEST, VECTORS, LOCK = "CURRENT", "checksums", "index.json", "vectors", ".lock"
KEPT = 2
"""Generations that a build keeps: its own, and the one that readers may be about to open."""
TAIL = 4
BLOCK = 1 << 16
"""Bytes that share a CRC-32. A smaller file is read, not mapped: a process may hold only a few files open."""


class DamagedFile(CorpusError, ValueError):
    """A file with other bytes than were written: the user's error, but in a search a fault, as any `ValueError`."""


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


def write_keys(folder: Path, name: str, values: Iterable[str]) -> None:
    """Write distinct strings as a list that `Keys` can search."""
    encoded = [value.encode() for value in values]
    (folder / f"{name}.bin").write_bytes(b"".join(encoded))
    np.save(folder / f"{name}.ends.npy", np.cumsum([0, *map(len, encoded)], dtype=np.int64))
    sums = np.fromiter(map(zlib.crc32, encoded), np.uint32, len(encoded))
    slots = np.argsort(sums, kind="stable").astype(np.int32)
    np.save(folder / f"{name}.sums.npy", sums[slots])
    np.save(folder / f"{name}.slots.npy", slots)


class Keys(Strings):
    """Strings to look up by value: sorted CRC-32s in `NAME.sums.npy`, their positions in `NAME.slots.npy`."""

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
            position if blob[begin:end] == value else self._match(value, at)
            for value, position, (begin, end), at in zip(encoded, likely.tolist(), bounds, first.tolist(), strict=True)
        ]

    def _match(self, value: bytes, at: int) -> int:
        sums, slots = self._sums.array, self._slots.array
        while at < len(sums) and sums[at] == zlib.crc32(value):
            position = int(slots[at])
            if self.view(position) == value:
                return position
            at += 1
        return -1


def current_generation(path: Path) -> Path:
    """Return the folder of the current generation. Raises CorpusError: there is no generation."""
    number = _current_number(path)
    if not number:
        raise CorpusError(f"{path} is not an index; one is built there by: harness1 index SOURCE --out {path}")
    return path / _name(number)


def _name(number: int) -> str:
    return f"gen-{number:06d}"


def _pointer(number: int) -> str:
    return f"{_name(number)} {zlib.crc32(_name(number).encode()):08x}\n"


def _current_number(path: Path) -> int:
    """Return the number of the current generation, or 0 if there is none."""
    lost = CorpusError(f"{path / CURRENT} does not name a generation: delete {path} and build it anew")
    try:
        pointer = (path / CURRENT).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise lost from error
    found = re.match(r"gen-(\d{6,9})\b", pointer, re.ASCII)
    number = int(found[1]) if found else 0
    if number and pointer in (_pointer(number), f"{_name(number)}\n"):  # earlier ones have no sum
        return number
    raise lost


@contextmanager
def _reporting(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(f"cannot build an index at {out}: {error}") from error


@contextmanager
def building(out: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Keep all other builds out of a folder, which is made if needed, until the context ends. `on_wait` is called
    before waiting for another build; None: do not wait. Raises CorpusError; UsageError."""
    with _reporting(out):
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("w")
    with file:
        lock(file, f"another build is at work in {out}", on_wait)
        yield


@contextmanager
def new_generation(out: Path, alone: bool = False) -> Iterator[Path]:
    """Yield an empty folder for the next generation, which becomes current when the context ends without an error.
    `alone`: the caller keeps other builds out (`building`). Raises CorpusError; UsageError."""
    with nullcontext() if alone else building(out), _reporting(out):
        number = _current_number(out) + 1
        for left in (*out.glob(".build-*"), out / _name(number)):  # by interrupted builds
            if left.exists():
                shutil.rmtree(left)
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=out))
        try:
            yield work
            for path in (*work.rglob("*"), work):  # every step is on the disk before the next begins
                _sync(path)
            work.chmod(0o755)
            work.rename(out / _name(number))
            _sync(out)
            pointer = out / f"{CURRENT}.new"
            pointer.write_text(_pointer(number), encoding="utf-8")
            _sync(pointer)
            pointer.replace(out / CURRENT)
            _sync(out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        for old in range(number - KEPT, 0, -1):
            shutil.rmtree(out / _name(old), ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Damage(Record):
    """A file that is not as it was written."""

    file: str
    reason: str


class IndexCheck(Record):
    """What checking an index found."""

    generation: str
    files: int
    bytes: int
    damaged: tuple[Damage, ...] = ()


def store_of(embedder: str) -> str:
    """Return the folder of the embeddings of an embedder in an index, by the embedder's hash."""
    return f"{VECTORS}/{embedder[:16]}"


def read_checksums(generation: Path) -> dict[str, Sums]:
    """Return checksums by paths in a generation, or of embeddings in the index. Raises DamagedFile; OSError."""
    path = generation / CHECKSUMS
    if not path.exists():
        return {}
    data = path.read_bytes()
    encoded, tail = data[:-TAIL], data[-TAIL:]
    if tail != zlib.crc32(encoded).to_bytes(TAIL, "little") or not encoded:
        raise DamagedFile(f"{path} is damaged")
    return msgspec.msgpack.decode(encoded, type=dict[str, Sums])


def write_checksums(generation: Path, known: Mapping[str, Sums]) -> None:
    """Write the checksums of a generation that is otherwise complete; `known` are those of earlier files."""
    sums = dict(known)
    for path in generation.rglob("*"):
        if path.is_file() and (name := path.relative_to(generation).as_posix()) not in known:
            sums[name] = Sums.of(CheckedFile(path).bytes)
    encoded = msgspec.msgpack.encode(dict(sorted(sums.items())))
    (generation / CHECKSUMS).write_bytes(encoded + zlib.crc32(encoded).to_bytes(TAIL, "little"))


def check_index(path: Path) -> IndexCheck:
    """Read the current generation, and return what is not as it was written. Raises CorpusError: no checksums."""
    generation = current_generation(path)
    sums = read_checksums(generation)
    if not sums:
        raise CorpusError(f"{path} has no checksums, because it was built before there were any: build it again")
    damaged = []
    for name, written in sums.items():
        outside = name.startswith(f"{VECTORS}/")
        try:
            _ = CheckedFile((path if outside else generation) / name, written, grows=outside).bytes
        except DamagedFile:
            damaged.append(Damage(name, "the bytes are not those that were written"))
        except OSError as error:
            damaged.append(Damage(name, error.strerror or str(error)))
    return IndexCheck(generation.name, len(sums), sum(each.size for each in sums.values()), tuple(damaged))
