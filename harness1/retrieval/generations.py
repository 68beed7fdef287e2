"""A folder of immutable generations, one of which the file CURRENT names, and their checksums.

    DIR/CURRENT                the name of the generation that readers open, and the CRC-32 of that name
    DIR/gen-000001/            one whole generation
    DIR/gen-000001/checksums   of every file in it and of the embeddings that it uses, and of these checksums (4 bytes)
    DIR/vectors/               embeddings, which all generations share
    DIR/.build-*/              a running build, or the remains of an interrupted one

A generation is written in full, then renamed into place, then CURRENT is replaced, so a reader never sees part of one,
and keeps the one that it has mapped. An index built before there were checksums is believed until it is changed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from harness1.errors import CorpusError
from harness1.records import Record
from harness1.retrieval.files import CheckedFile, DamagedFile, Sums
from harness1.runs.files import lock

CURRENT, CHECKSUMS, MANIFEST, VECTORS = "CURRENT", "checksums", "index.json", "vectors"
LOCK = ".lock"
KEPT = 2
"""Generations that a build keeps: its own, and the one that readers may be about to open."""
TAIL = 4


def current_generation(path: Path) -> Path:
    """Return the folder of the current generation. Raises CorpusError: there is no generation."""
    number = _current_number(path)
    if not number:
        raise CorpusError(f"{path} is not an index; one is built there by: harness1 index SOURCE --out {path}")
    return path / _name(number)


@contextmanager
def building(out: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Keep all other builds out of a folder, which is made if needed, until the context ends. `on_wait` is called
    before waiting for another build; None: do not wait. Raises CorpusError: the folder cannot be written;
    UsageError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("w")
    except OSError as error:
        raise CorpusError(f"cannot build an index at {out}: {error}") from error
    with file:
        lock(file, f"another build is at work in {out}", on_wait)
        yield


@contextmanager
def new_generation(out: Path) -> Iterator[Path]:
    """Yield an empty folder for the next generation, which becomes current when the context ends without an error. The
    caller keeps other builds out (`building`). Raises CorpusError: the folder cannot be written."""
    try:
        number = _current_number(out) + 1
        for left in (*out.glob(".build-*"), out / _name(number)):  # by interrupted builds
            if left.exists():
                shutil.rmtree(left)
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


def _pointer(number: int) -> str:
    name = _name(number)
    return f"{name} {zlib.crc32(name.encode()):08x}\n"


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


def _publish(out: Path, work: Path, number: int) -> None:
    """Make a complete work folder the current generation; every step is on the disk before the next begins."""
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
    """Return the checksums of a generation, by paths in it and, for embeddings, in the index; none if it has none.
    Raises DamagedFile: they are damaged themselves; OSError."""
    path = generation / CHECKSUMS
    if not path.exists():
        return {}
    data = path.read_bytes()
    encoded, tail = data[:-TAIL], data[-TAIL:]
    if tail != zlib.crc32(encoded).to_bytes(TAIL, "little") or not encoded:
        raise DamagedFile(f"{path} is damaged")
    return msgspec.msgpack.decode(encoded, type=dict[str, Sums])


def write_checksums(generation: Path, known: Mapping[str, Sums]) -> None:
    """Write the checksums of a generation that is otherwise complete; `known` are those of files that were there
    before."""
    paths = {path.relative_to(generation).as_posix(): path for path in generation.rglob("*") if path.is_file()}
    new = {name: Sums.of(CheckedFile(path).bytes) for name, path in paths.items() if name not in known}
    encoded = msgspec.msgpack.encode(dict(sorted({**known, **new}.items())))
    (generation / CHECKSUMS).write_bytes(encoded + zlib.crc32(encoded).to_bytes(TAIL, "little"))


def check_index(path: Path) -> IndexCheck:
    """Read all of the current generation, and return what is not as it was written. Raises CorpusError: the folder is
    no index, or has no checksums, or they are damaged."""
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
