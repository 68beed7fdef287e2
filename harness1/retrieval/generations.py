"""A folder of immutable generations, one of which the file CURRENT names.

    DIR/CURRENT          the name of the generation that readers open, and the CRC-32 of that name
    DIR/gen-000001/      one whole generation
    DIR/.build-*/        a running build, or the remains of an interrupted one

A generation is written in full, then renamed into place, then CURRENT is replaced. A reader that opens the folder sees
the earlier generation or the new one, never part of one. A reader that has an older generation mapped keeps it, even
when a later build deletes its files.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import msgspec

from harness1.errors import CorpusError
from harness1.records import Record
from harness1.retrieval.files import DamagedFile, Sums, damaged_blocks, sums_of
from harness1.runs.files import lock, lock_or_wait

CURRENT = "CURRENT"
LOCK = ".lock"
"""The file that a build holds locked; it stays."""
KEPT = 2
"""Generations that a build keeps: its own, and the one that readers may be about to open."""


def current_generation(path: Path) -> Path:
    """Return the folder of the current generation.

    Raises:
        CorpusError: there is no generation.
    """
    number = _current_number(path)
    if not number:
        raise CorpusError(f"{path} is not an index; one is built there by: harness1 index SOURCE --out {path}")
    return path / _name(number)


@contextmanager
def building(out: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Keep all other builds out of a folder, which is made if needed, until the context ends.

    Args:
        on_wait: is called before waiting for another build that is at work; None: do not wait.

    Raises:
        CorpusError: the folder cannot be written.
        UsageError: another build is at work in the folder.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("w")
    except OSError as error:
        raise _failed(out, error) from error
    with file:
        if on_wait:
            lock_or_wait(file, on_wait)
        else:
            lock(file, f"another build is at work in {out}")
        yield


@contextmanager
def new_generation(out: Path) -> Iterator[Path]:
    """Yield an empty folder for the next generation, which becomes current when the context ends without an error. The
    caller keeps other builds out (`building`).

    Raises:
        CorpusError: the disk is full or the folder cannot be written. The earlier generation stays as it was.
    """
    try:
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
        raise _failed(out, error) from error


def _failed(out: Path, error: OSError) -> CorpusError:
    return CorpusError(f"cannot build an index at {out}: {error}")


def _name(number: int) -> str:
    return f"gen-{number:06d}"


def _pointer(number: int) -> str:
    """Return what CURRENT says. With the sum, a damaged name cannot be taken for the name of another generation."""
    name = _name(number)
    return f"{name} {zlib.crc32(name.encode()):08x}\n"


def _current_number(path: Path) -> int:
    """Return the number of the current generation, or 0 if there is none."""
    try:
        pointer = (path / CURRENT).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise _lost(path) from error
    found = re.match(r"gen-(\d{6,9})\b", pointer, re.ASCII)
    number = int(found[1]) if found else 0
    if number and pointer in (_pointer(number), f"{_name(number)}\n"):  # earlier ones have no sum
        return number
    raise _lost(path)


def _lost(path: Path) -> CorpusError:
    return CorpusError(f"{path / CURRENT} does not name a generation: delete {path} and build it anew")


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
    pointer.write_text(_pointer(number), encoding="utf-8")
    _sync(pointer)
    pointer.replace(out / CURRENT)
    _sync(out)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


CHECKSUMS, MANIFEST = "checksums", "index.json"
VECTORS = "vectors"
TAIL = 4
"""Bytes at the end of the file, for its own checksum."""


class Damage(Record):
    """A file, or a stretch of its blocks, that is not as it was written."""

    file: str
    reason: str
    blocks: tuple[int, int] | None = None
    """The numbers of the first and the last; a block is 64 KiB."""


class Verdict(Record):
    """What checking an index found."""

    generation: str
    files: int
    bytes: int
    damaged: tuple[Damage, ...] = ()


def store_of(embedder: str) -> str:
    """Return the folder of the embeddings of an embedder in an index, by the embedder's hash."""
    return f"{VECTORS}/{embedder[:16]}"


def read_checksums(generation: Path) -> dict[str, Sums]:
    """Return the checksums of a generation, by paths in it and, for embeddings, in the index; none if it has none.

    Raises:
        DamagedFile: they are damaged themselves.
        OSError: they cannot be read.
    """
    path = generation / CHECKSUMS
    if not path.exists():
        return {}
    data = path.read_bytes()
    encoded, tail = data[:-TAIL], data[-TAIL:]
    if tail != zlib.crc32(encoded).to_bytes(TAIL, "little") or not encoded:
        raise DamagedFile(f"{path} is damaged")
    return msgspec.msgpack.decode(encoded, type=dict[str, Sums])


def write_checksums(generation: Path, known: Mapping[str, Sums]) -> None:
    """Write the checksums of a generation that is otherwise complete.

    Args:
        known: those of files that were there before, and of files outside the generation.
    """
    paths = {path.relative_to(generation).as_posix(): path for path in generation.rglob("*") if path.is_file()}
    new = {name: sums_of(path) for name, path in paths.items() if name not in known}
    encoded = msgspec.msgpack.encode(dict(sorted({**known, **new}.items())))
    (generation / CHECKSUMS).write_bytes(encoded + zlib.crc32(encoded).to_bytes(TAIL, "little"))


def check_index(path: Path) -> Verdict:
    """Read all of the current generation of an index, and return what is not as it was written.

    Raises:
        CorpusError: the folder is no index, or has no checksums, or they are damaged.
    """
    generation = current_generation(path)
    sums = read_checksums(generation)
    if not sums:
        raise CorpusError(f"{path} has no checksums, because it was built before there were any: build it again")
    damaged = tuple(damage for name in sums for damage in _damages(path, generation, name, sums))
    return Verdict(generation.name, len(sums), sum(each.size for each in sums.values()), damaged)


def _damages(path: Path, generation: Path, name: str, sums: Mapping[str, Sums]) -> Iterator[Damage]:
    """Yield the damaged stretches of a file."""
    outside = name.startswith(f"{VECTORS}/")
    file, written = (path if outside else generation) / name, sums[name]
    try:
        blocks = damaged_blocks(file, written, grows=outside)
        for _, stretch in groupby(enumerate(blocks), key=lambda each: each[1] - each[0]):
            numbers = [block for _, block in stretch]
            yield Damage(name, "the bytes have changed", (numbers[0], numbers[-1]))
    except DamagedFile as error:
        yield Damage(name, str(error))
    except OSError as error:
        yield Damage(name, error.strerror or str(error))
