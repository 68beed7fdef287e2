"""The checksums of a generation, in its file `checksums`: of every file in it, and of the embeddings that it uses.

The file ends with the CRC-32 of all that stands before, in 4 bytes. It is written last, so that it covers `index.json`.
An index built before there were checksums is believed, until something is added to it or deleted.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import msgspec

from harness1.errors import CorpusError
from harness1.records import Record
from harness1.retrieval.checked import DamagedFile, Sums, damaged_blocks, sums_of
from harness1.retrieval.index.generations import current_generation

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
