"""Episodes on disk: one line of JSON each, appended as they finish, and a binary side file for tokens.

The tokens of an episode are written before its line, so that a line never refers to what is not there. A torn last
line, left by a crash, is cut off when the folder is opened for writing and skipped when it is read.
"""

from __future__ import annotations

import fcntl
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from harness1.errors import SchemaError, UsageError
from harness1.records import Episode, EpisodeKey, ModelCall, Status, TokenBlob, Turn, decode_episode, encode_episode

EPISODES = "episodes.jsonl"
TOKENS = "tokens.bin"


class EpisodeStore:
    """Appends episodes to a run folder; one process at a time holds it.

    Attributes:
        torn: bytes of a torn last line that were cut off on opening.

    Raises:
        UsageError: another process is writing to the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / EPISODES).open("ab+")
        try:
            fcntl.flock(self._lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lines.close()
            raise UsageError(f"{folder} is being written by another process") from error
        self._tokens = (folder / TOKENS).open("ab")
        self.torn = self._cut_torn_line()

    def append(self, episode: Episode) -> None:
        """Write one finished episode; it is on disk when this returns, as far as the operating system is concerned."""
        stored = _detach(episode, self._tokens.tell())
        if stored.tokens is not None:
            self._tokens.write(_blob(episode))
            self._tokens.flush()
        self._lines.write(encode_episode(stored) + b"\n")
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
        self._tokens.close()

    def __enter__(self) -> EpisodeStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut_torn_line(self) -> int:
        self._lines.seek(0)
        data = self._lines.read()
        end = data.rfind(b"\n") + 1
        self._lines.truncate(end)
        self._lines.seek(end)
        return len(data) - end


def read_episodes(folder: Path, on_torn: Callable[[int], None] | None = None) -> Iterator[Episode]:
    """The episodes of a run in the order written; of one that was run again, every line.

    Args:
        on_torn: called with its size in bytes if the last line is torn; it is left out.

    Raises:
        UsageError: there is no run in the folder.
        SchemaError: a line is no episode, is newer than this package, or its tokens are damaged.
    """
    path = folder / EPISODES
    if not path.is_file():
        raise UsageError(f"{folder} holds no {EPISODES}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                if on_torn is not None:
                    on_torn(len(line))
                return
            try:
                yield _attach(decode_episode(line), folder)
            except SchemaError as error:
                raise SchemaError(f"{path}:{number}: {error}") from error


def latest_episodes(folder: Path) -> dict[EpisodeKey, Episode]:
    """The last episode of each key: one that failed and was run again counts as it ended the last time."""
    return {episode.key: episode for episode in read_episodes(folder)}


def finished_keys(folder: Path) -> set[EpisodeKey]:
    """The work that need not be done again. Episodes that the infrastructure broke are not among it."""
    if not (folder / EPISODES).is_file():
        return set()
    latest = latest_episodes(folder).values()
    return {episode.key for episode in latest if episode.status is not Status.INFRA_ERROR}


def _calls(episode: Episode) -> Iterator[ModelCall]:
    for turn in episode.turns:
        yield from turn.calls


def _arrays(episode: Episode) -> Iterator[np.ndarray]:
    for call in _calls(episode):
        yield np.asarray(call.output_ids, dtype="<i4")
        yield np.asarray(call.output_logprobs, dtype="<f4")
    for ids in episode.segments.values():
        yield np.asarray(ids, dtype="<i4")


def _blob(episode: Episode) -> bytes:
    return b"".join(array.tobytes() for array in _arrays(episode))


def _detach(episode: Episode, offset: int) -> Episode:
    """The episode as it stands in its line: token arrays replaced by a reference to the side file."""
    blob = _blob(episode)
    if not blob:
        return episode
    counts = tuple(len(array) for array in _arrays(episode))
    turns = tuple(_with_calls(turn, [_bare(call) for call in turn.calls]) for turn in episode.turns)
    return msgspec.structs.replace(
        episode,
        turns=turns,
        segments=dict.fromkeys(episode.segments, ()),
        tokens=TokenBlob(offset, len(blob), zlib.crc32(blob), counts),
    )


def _attach(episode: Episode, folder: Path) -> Episode:
    """The opposite of `_detach`: token arrays read back from the side file."""
    if episode.tokens is None:
        return episode
    if not (folder / TOKENS).is_file():
        raise SchemaError(f"{TOKENS}, which holds its tokens, is missing")
    with (folder / TOKENS).open("rb") as tokens:
        tokens.seek(episode.tokens.offset)
        blob = tokens.read(episode.tokens.size)
    if zlib.crc32(blob) != episode.tokens.crc32:
        raise SchemaError(f"the tokens of episode {episode.episode_id} are damaged")
    parts = _split(blob, episode.tokens.counts)
    turns = tuple(_with_calls(turn, [_filled(call, parts) for call in turn.calls]) for turn in episode.turns)
    segments = {name: tuple(next(parts).view("<i4").tolist()) for name in episode.segments}
    return msgspec.structs.replace(episode, turns=turns, segments=segments, tokens=None)


def _split(blob: bytes, counts: tuple[int, ...]) -> Iterator[np.ndarray]:
    words = np.frombuffer(blob, dtype="<u4")
    start = 0
    for count in counts:
        yield words[start : start + count]
        start += count


def _with_calls(turn: Turn, calls: list[ModelCall]) -> Turn:
    return msgspec.structs.replace(turn, calls=tuple(calls))


def _bare(call: ModelCall) -> ModelCall:
    return msgspec.structs.replace(call, output_ids=(), output_logprobs=())


def _filled(call: ModelCall, parts: Iterator[np.ndarray]) -> ModelCall:
    ids = tuple(next(parts).view("<i4").tolist())
    return msgspec.structs.replace(call, output_ids=ids, output_logprobs=tuple(next(parts).view("<f4").tolist()))
