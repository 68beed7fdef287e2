"""A file of lines that only grows, with a binary file beside it for the numbers of each line, digests of its lines, and
the episodes of a run in it. The numbers of a line are written before it, so that it never refers to missing ones. A
torn last line, left by a crash, is cut off when the journal is opened for writing. The digest of a line covers its
bytes and the key of its run; when a run ends, its card also gets a digest of all lines in their order and of the card
itself. This finds lines that were edited, lost, added or moved; whoever means to deceive can compute them again."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.plain import digest
from harness1.records import Episode, EpisodeKey, ModelCall, Record, TokenBlob, Turn, decode_episode, encode_episode
from harness1.runs.files import Stage, lock, read_raw_stage, read_stage, replacing

R = TypeVar("R")

EPISODES = "episodes.jsonl"
TOKENS = "tokens.bin"
LINES = "lines"  # the name, among a card's outputs, of what it says about its lines
BLOCK = 1 << 16  # bytes that are read at a time to find the end of the last line

_MARK = b',"digest":"'
_DIGITS = 32
_TAIL = len(_MARK) + _DIGITS + len(b'"}')


class Journal:
    """Appends to the two files of a folder, which one process at a time holds until it closes them. `numbers`: the name
    of the binary file, if lines have numbers. `wait`: for a process that is writing to the folder. `torn`: bytes of a
    torn last line, cut off on opening. Raises UsageError: another process writes to the folder, or this one cannot."""

    def __init__(self, folder: Path, lines: str, numbers: str = "", *, wait: bool = False) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = (folder / lines).open("ab+")
        except OSError as error:
            raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
        refusal = f"{folder} is being written by another process"
        try:
            lock(self._lines, refusal, on_wait=(lambda: None) if wait else None)
            if os.fstat(self._lines.fileno()).st_ino != (folder / lines).stat().st_ino:  # it has just been replaced
                raise UsageError(refusal)
        except (UsageError, FileNotFoundError) as error:
            self._lines.close()
            raise UsageError(refusal) from error
        self._numbers = (folder / numbers).open("ab") if numbers else None
        size = end = self._lines.seek(0, os.SEEK_END)
        newline = 0
        while end and not newline:
            start = max(0, end - BLOCK)
            self._lines.seek(start)
            newline = self._lines.read(end - start).rfind(b"\n") + 1
            end = start + newline
        self._lines.truncate(end)
        self._lines.seek(end)
        self.torn = size - end

    @property
    def offset(self) -> int:
        """Where the next numbers will begin, in bytes."""
        return self._numbers.tell() if self._numbers else 0

    def write(self, line: bytes, numbers: bytes = b"") -> None:
        """Write one line and its numbers; the operating system has both when this returns."""
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


def hold(folder: Path, lines: str) -> AbstractContextManager[object]:
    """Return a context that keeps other processes away from a folder's journal, if there is one."""
    return Journal(folder, lines) if (folder / lines).is_file() else nullcontext()


def read_lines(path: Path, on_torn: Callable[[int], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines, without a torn last one, of whose bytes `on_torn` is told. Raises UsageError: no file."""
    if not path.is_file():
        raise UsageError(f"{path.parent} holds no {path.name}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                if on_torn is not None:
                    on_torn(len(line))
                return
            yield number, line


def read_line_records(path: Path, kind: type[R], what: str) -> Iterator[R]:
    """Yield the lines of a journal as records, without a torn last one. Raises SchemaError: a line is not `what`."""
    for number, line in read_lines(path):
        try:
            yield msgspec.json.decode(line, type=kind)
        except MALFORMED as error:
            raise SchemaError(f"{path}:{number}: not {what}: {error}") from error


def to_bytes(arrays: Sequence[np.ndarray], offset: int) -> tuple[bytes, TokenBlob | None]:
    """Return arrays of four-byte numbers as bytes, and how to find them in the file again; None for no numbers."""
    blob = b"".join(array.tobytes() for array in arrays)
    if not blob:
        return blob, None
    return blob, TokenBlob(offset, len(blob), zlib.crc32(blob), tuple(map(len, arrays)))


def unpack(path: Path, place: TokenBlob, of: str) -> Iterator[np.ndarray]:
    """Yield the arrays again, as untyped words of four bytes. Raises SchemaError: they are missing or damaged."""
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


class Lines(Record):
    """What the card of a run says about its lines; the last three are empty while it goes on."""

    key: str = ""  # seeds the digests of lines
    undigested: int | None = None  # lines without a digest, which earlier versions wrote; None: any number
    size: int = 0  # bytes of all lines when the run ended
    digest: str = ""  # of all lines in their order, and of the card
    fold: str = ""  # of all lines in their order, from which a further line continues


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
    """Return what a card says about its lines; nothing for that of an earlier version, and for none."""
    found = {} if stage is None or stage.verb != "run" else stage.outputs.get(LINES, {})
    try:
        return msgspec.convert(found, Lines)
    except MALFORMED as error:
        raise SchemaError(f"the card does not say how its lines were recorded: {error}") from error


def check_lines(path: Path, lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the numbered lines of a record without their digests, after comparing these. Raises SchemaError: a line was
    changed or is of another run; or, at the end, lines of a finished run were lost, added or moved, or its card was."""
    stage = read_raw_stage(path.parent)
    said = lines_of(stage)
    fold, plain = "", 0
    for number, line in lines:
        body, found = check_line(line, said.key, f"{path}:{number}")
        plain += not found
        if said.undigested is not None and plain > said.undigested:
            raise SchemaError(f"{path}:{number}: this line has lost its digest")
        fold = _fold(fold, found or body)
        yield number, body
    closed = said.digest or said.fold or said.size
    if stage is not None and closed and (said.fold, said.digest) != (fold, _seal(stage, said)):
        why = "lines were lost, added or moved, or the card was edited"
        raise SchemaError(f"{path} or its card was changed after the run had ended: {why}")


def check_line(line: bytes, key: str, place: str) -> tuple[bytes, bytes]:
    """Return a line without its digest, and the digest. Raises SchemaError: they differ."""
    body, found = without_digest(line.removesuffix(b"\n"))
    if found and found != _digest_of(body, key):
        raise SchemaError(f"{place}: this line was changed, or was recorded in another run")
    return body, found


def count_undigested(path: Path) -> int:
    """Return the number of whole lines without a digest; 0 if there is no such file."""
    return sum(not without_digest(line[:-1])[1] for _, line in read_lines(path)) if path.is_file() else 0


def continue_lines(stage: Stage, path: Path) -> Stage:
    """Return the card for writing further lines: it keeps the key and the origins of those that are there."""
    card = read_raw_stage(path.parent)
    before, there = lines_of(card), path.is_file() and path.stat().st_size > 0
    now = Lines(lines_of(stage).key, 0)
    if there and before.undigested is not None:
        now = Lines(before.key, before.undigested)
    elif there:
        plain = count_undigested(path)
        mixed = plain < sum(1 for _ in read_lines(path))
        now = Lines("" if mixed else now.key, plain)
    origins = tuple(sorted({*stage.origins, *(card.origins if card else ())}))
    return replace(stage, outputs={**stage.outputs, LINES: msgspec.to_builtins(now)}, origins=origins)


def finish(stage: Stage, path: Path, earlier: Lines | None = None, **changes: Any) -> Stage:
    """Write the card of a run that has ended, with changes and the digest of its lines; return it as written.
    `earlier`: what the card said before lines were added, if nothing else has happened to them: only these are read."""
    stage = replace(stage, status="finished", **changes)
    begin, fold = (earlier.size, earlier.fold) if earlier is not None and earlier.digest else (0, "")
    with path.open("rb") as file:
        file.seek(begin)
        for line in file:
            body, found = without_digest(line.removesuffix(b"\n"))
            fold = _fold(fold, found or body)
        size = file.tell()
    said = replace(lines_of(stage), size=size, fold=fold)
    said = replace(said, digest=_seal(stage, said))
    return stage.write(path.parent, outputs={**stage.outputs, LINES: msgspec.to_builtins(said)})


def is_unchanged(path: Path) -> bool:
    """Return whether all lines are those that were recorded, and, if the run has ended, none is missing."""
    try:
        return all(True for _ in check_lines(path, read_lines(path)))
    except SchemaError:
        return False


def _digest_of(body: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + body).hexdigest()[:_DIGITS].encode()


def _fold(fold: str, found: bytes) -> str:
    return hashlib.sha256(fold.encode() + found).hexdigest()


def _seal(stage: Stage, said: Lines) -> str:
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(stage))
    outputs = {name: value for name, value in plain.get("outputs", {}).items() if name != LINES}
    return digest([replace(said, digest=""), {**plain, "outputs": outputs}])


class EpisodeStore(Journal):
    """Append finished episodes to a run folder, made if need be; used and locked as a `Journal`. A line of
    `episodes.jsonl` is an episode; `tokens.bin` holds token ids (int32) and log probabilities (float32). `torn`: bytes
    of a torn last line, which opening the store cuts off.

    Raises:
        UsageError: another process is writing to the folder, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, EPISODES, TOKENS)
        self._folder = folder
        self._key: str | None = None

    def append(self, episode: Episode) -> None:
        """Write one finished episode; the operating system has it when this returns."""
        if self._key is None:  # the card is written after the folder is locked, and before any line
            self._key = lines_of(read_stage(self._folder)).key
        arrays = list[np.ndarray]()
        for call in (call for turn in episode.turns for call in turn.calls):
            arrays += [np.asarray(call.output_ids, dtype="<i4"), np.asarray(call.output_logprobs, dtype="<f4")]
        arrays += [np.asarray(ids, dtype="<i4") for ids in episode.segments.values()]
        blob, place = to_bytes(arrays, self.offset)
        if place is not None:
            turns = _with_calls(episode, lambda call: replace(call, output_ids=(), output_logprobs=()))
            segments: dict[str, tuple[int, ...]] = dict.fromkeys(episode.segments, ())
            episode = replace(episode, turns=turns, segments=segments, tokens=place)
        self.write(with_digest(encode_episode(episode), self._key), blob)


def read_episodes(folder: Path, on_torn: Callable[[int], None] | None = None) -> Iterator[Episode]:
    """Yield the episodes of a run in the order written, including every line of an episode that was played again.
    `on_torn` is called with the bytes of a torn last line, which is left out.

    Raises:
        UsageError: the folder holds no run.
        SchemaError: a line is no episode, is newer than this package, or was changed; or lines or tokens are lost.
    """
    path = folder / EPISODES
    for number, line in check_lines(path, read_lines(path, on_torn)):
        try:
            episode = decode_episode(line)
            if episode.digest:
                raise SchemaError("its digest is not at the end of the line")
            yield _attach(episode, folder)
        except SchemaError as error:
            raise SchemaError(f"{path}:{number}: {error}") from error


def read_appended(folder: Path, start: int, most: int) -> Iterator[tuple[int, int, Episode]]:
    """Yield at most `most` episodes of a run that is under way from a byte on: where each begins and ends, and the
    episode. A last line that is not whole yet is left for later."""
    path, key = folder / EPISODES, lines_of(read_raw_stage(folder)).key
    with path.open("rb") as lines:
        lines.seek(start)
        for line in islice(lines, most):
            if not line.endswith(b"\n"):
                return
            body, _ = check_line(line, key, f"{path}, byte {start}")
            yield start, start + len(line), _attach(decode_episode(body), folder)
            start += len(line)


def line_starts(folder: Path) -> Sequence[int]:
    """Return the byte at which each line of a run's episodes begins, as `read_appended` takes it."""
    with (folder / EPISODES).open("rb") as lines:
        return list(accumulate(map(len, lines), initial=0))[:-1]


def rewrite_episodes(folder: Path, scored: Callable[[Episode], Episode]) -> None:
    """Replace the reward of every episode of a run, and the hash of its weights, by those that `scored` gives; only
    while holding the folder's `EpisodeStore`, which then cannot be used further."""
    path, key = folder / EPISODES, lines_of(read_stage(folder)).key
    with replacing(path) as file:
        for _, line in check_lines(path, read_lines(path)):
            stored = decode_episode(line)
            now = scored(_attach(stored, folder))
            again = replace(stored, reward=now.reward, hashes=now.hashes)
            file.write(with_digest(encode_episode(again), key) + b"\n")


def latest_episodes(folder: Path) -> dict[EpisodeKey, Episode]:
    """Return the last episode of each key: one that failed and was run again counts as it ended the last time."""
    return {episode.key: episode for episode in read_episodes(folder)}


def _attach(episode: Episode, folder: Path) -> Episode:
    if episode.tokens is None:
        return episode
    parts = unpack(folder / TOKENS, episode.tokens, f"episode {episode.episode_id}")

    def fill(call: ModelCall) -> ModelCall:
        ids, logprobs = (tuple(next(parts).view(kind).tolist()) for kind in ("<i4", "<f4"))
        return replace(call, output_ids=ids, output_logprobs=logprobs)

    turns = _with_calls(episode, fill)
    segments = {name: tuple(next(parts).view("<i4").tolist()) for name in episode.segments}
    return replace(episode, turns=turns, segments=segments, tokens=None)


def _with_calls(episode: Episode, changed: Callable[[ModelCall], ModelCall]) -> tuple[Turn, ...]:
    return tuple(replace(turn, calls=tuple(map(changed, turn.calls))) for turn in episode.turns)
