"""Digests of recorded lines: a line that was edited, or that belongs to another run, is found when it is read, and so
is one that was lost, added or moved after its run ended.

The digest of a line covers its bytes and the key of its run, which is in the run's card. When a run ends, its card also
gets a digest of all lines in their order and of the card itself. This finds accidents and careless edits; whoever means
to deceive can compute every digest again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import MALFORMED, SchemaError
from harness1.hashing import digest
from harness1.records import Record
from harness1.runs.journal import read_lines
from harness1.runs.stage import Stage, read_raw_stage

LINES = "lines"
"""The name, among a card's outputs, of what it says about its lines."""

_MARK = b',"digest":"'
_DIGITS = 32
_TAIL = len(_MARK) + _DIGITS + len(b'"}')


class Lines(Record):
    """What the card of a run says about its lines."""

    key: str = ""
    """Seeds their digests."""
    undigested: int | None = None
    """Number of lines without a digest, which earlier versions wrote; None: any number."""
    size: int = 0
    """Bytes of all lines when the run ended."""
    digest: str = ""
    """Digest of all lines in their order, and of the card; empty while the run goes on."""
    fold: str = ""
    """Digest of all lines in their order, from which a further line continues."""


def with_digest(line: bytes, key: str = "") -> bytes:
    """Return a line, a JSON object, with its digest as the last field; a record that is no run has no key."""
    return line[:-1] + _MARK + _digest_of(line, key) + b'"}'


def without_digest(line: bytes) -> tuple[bytes, bytes]:
    """Return a line without its digest, and the digest; it is empty if the line has none."""
    tail = line[-_TAIL:]
    if len(line) > _TAIL and tail.startswith(_MARK) and tail.endswith(b'"}'):
        return line[:-_TAIL] + b"}", tail[len(_MARK) : -2]
    return line, b""


def lines_of(stage: Stage | None) -> Lines:
    """Return what a card says about its lines; nothing for the card of an earlier version, and for none.

    Raises:
        SchemaError: the card is damaged.
    """
    found = {} if stage is None or stage.verb != "run" else stage.outputs.get(LINES, {})
    try:
        return msgspec.convert(found, Lines)
    except MALFORMED as error:
        raise SchemaError(f"the card does not say how its lines were recorded: {error}") from error


def checked_lines(path: Path, lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the numbered lines of a record without their digests, after comparing these.

    Args:
        path: the file of the lines, beside the card of its run.

    Raises:
        SchemaError: a line was changed, comes from another run, or lacks its digest; or, at the end, lines of a
            finished run were lost, added or moved, or its card was changed.
    """
    stage = read_raw_stage(path.parent)
    said = lines_of(stage)
    fold, plain = "", 0
    for number, line in lines:
        body, found = checked_line(line, said.key, f"{path}:{number}")
        plain += not found
        if said.undigested is not None and plain > said.undigested:
            raise SchemaError(f"{path}:{number}: this line has lost its digest")
        fold = _folded(fold, found or body)
        yield number, body
    closed = said.digest or said.fold or said.size
    if stage is not None and closed and (said.fold, said.digest) != (fold, _sealed(stage, said)):
        raise SchemaError(
            f"{path} or its card was changed after the run had ended: lines were lost, added or moved, or"
            " the card was edited"
        )


def checked_line(line: bytes, key: str, place: str) -> tuple[bytes, bytes]:
    """Return a line without its digest, and the digest; raise SchemaError, which names the place, if they differ."""
    body, found = without_digest(line.removesuffix(b"\n"))
    if found and found != _digest_of(body, key):
        raise SchemaError(f"{place}: this line was changed, or was recorded in another run")
    return body, found


def undigested_lines(path: Path) -> int:
    """Return the number of whole lines without a digest; 0 if there is no such file."""
    return sum(not without_digest(line[:-1])[1] for _, line in read_lines(path)) if path.is_file() else 0


def continued(stage: Stage, path: Path) -> Stage:
    """Return the card of a run for writing further lines: it keeps the key of those that are there already.

    Raises:
        SchemaError: the card in the folder is damaged.
    """
    before, there = lines_of(read_raw_stage(path.parent)), path.is_file() and path.stat().st_size > 0
    now = Lines(lines_of(stage).key, 0)
    if there and before.undigested is not None:
        now = Lines(before.key, before.undigested)
    elif there:
        plain = undigested_lines(path)
        mixed = plain < sum(1 for _ in read_lines(path))
        now = Lines("" if mixed else now.key, plain)
    return msgspec.structs.replace(stage, outputs={**stage.outputs, LINES: msgspec.to_builtins(now)})


def finish(stage: Stage, path: Path, earlier: Lines | None = None, **changes: Any) -> Stage:
    """Write the card of a run that has ended, with the digest of its lines; return it as written.

    Args:
        earlier: what the card said before lines were added, if nothing else has happened to them: only these are read.
        changes: of the card, as in `Stage.write`.
    """
    stage = msgspec.structs.replace(stage, status="finished", **changes)
    begin = earlier.size if earlier is not None and earlier.digest else 0
    fold = earlier.fold if earlier is not None and begin else ""
    with path.open("rb") as file:
        file.seek(begin)
        for line in file:
            body, found = without_digest(line.removesuffix(b"\n"))
            fold = _folded(fold, found or body)
        size = file.tell()
    said = msgspec.structs.replace(lines_of(stage), size=size, fold=fold)
    said = msgspec.structs.replace(said, digest=_sealed(stage, said))
    return stage.write(path.parent, outputs={**stage.outputs, LINES: msgspec.to_builtins(said)})


def is_unchanged(path: Path) -> bool:
    """Return whether all lines are those that were recorded, and, if the run has ended, none is missing."""
    try:
        return all(True for _ in checked_lines(path, read_lines(path)))
    except SchemaError:
        return False


def _digest_of(body: bytes, key: str) -> bytes:
    seen = hashlib.sha256(key.encode())
    seen.update(body)
    return seen.hexdigest()[:_DIGITS].encode()


def _folded(fold: str, found: bytes) -> str:
    """Add a line, by its digest if it has one, to the digest of all lines before it."""
    seen = hashlib.sha256(fold.encode())
    seen.update(found)
    return seen.hexdigest()


def _sealed(stage: Stage, said: Lines) -> str:
    """Return the digest of all lines together with what the card says about them and about the run."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(stage))
    outputs = {name: value for name, value in plain.get("outputs", {}).items() if name != LINES}
    return digest([msgspec.structs.replace(said, digest=""), {**plain, "outputs": outputs}])
