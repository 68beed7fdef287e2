"""Episodes on disk: one line of JSON each, appended as they finish, and a binary side file for tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path

import msgspec
import numpy as np

from harness1.errors import SchemaError
from harness1.records import Episode, EpisodeKey, ModelCall, Turn, decode_episode, encode_episode
from harness1.runs.files import replacing
from harness1.runs.journal import Journal, read_lines, to_bytes, unpacked
from harness1.runs.line_digests import checked_line, checked_lines, lines_of, with_digest
from harness1.runs.stage import read_raw_stage, read_stage

EPISODES = "episodes.jsonl"
TOKENS = "tokens.bin"


class EpisodeStore(Journal):
    """Append finished episodes to a run folder, made if need be; used and locked as a `Journal`.

    A line of `episodes.jsonl` is an episode; `tokens.bin` holds token ids (int32) and log probabilities (float32).
    `torn` is the size in bytes of a torn last line, which opening the store cuts off.

    Raises:
        UsageError: another process is writing to the folder, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, EPISODES, TOKENS)
        self._folder = folder

    def append(self, episode: Episode) -> None:
        """Write one finished episode; it is on disk when this returns, as far as the operating system is concerned."""
        stored, blob = _detach(episode, self.offset)
        self.write(with_digest(encode_episode(stored), self._key), blob)

    @cached_property
    def _key(self) -> str:
        """The key of the line digests, from the card: it is written after the folder is locked, and before any line."""
        return lines_of(read_stage(self._folder)).key


def read_episodes(folder: Path, on_torn: Callable[[int], None] | None = None) -> Iterator[Episode]:
    """Yield the episodes of a run in the order written, including every line of an episode that was played again.

    Args:
        on_torn: is called with the bytes of a torn last line, which is left out.

    Raises:
        UsageError: the folder holds no run.
        SchemaError: a line is not an episode, is newer than this package, or was changed after it was recorded; or
            lines or tokens are lost or damaged.
    """
    path = folder / EPISODES
    for number, line in checked_lines(path, read_lines(path, on_torn)):
        try:
            episode = decode_episode(line)
            if episode.digest:
                raise SchemaError("its digest is not at the end of the line")
            yield _attach(episode, folder)
        except SchemaError as error:
            raise SchemaError(f"{path}:{number}: {error}") from error


def read_appended(folder: Path, start: int, most: int) -> Iterator[tuple[int, int, Episode]]:
    """Yield the episodes of a run that is under way from a byte on: where each begins and ends, and the episode. A last
    line that is not whole yet is left for later.

    Args:
        most: the number of episodes to read.

    Raises:
        SchemaError: a line is not an episode, or was changed after it was recorded.
    """
    path, key = folder / EPISODES, lines_of(read_raw_stage(folder)).key
    with path.open("rb") as lines:
        lines.seek(start)
        for line in islice(lines, most):
            if not line.endswith(b"\n"):
                return
            body, _ = checked_line(line, key, f"{path}, byte {start}")
            yield start, start + len(line), _attach(decode_episode(body), folder)
            start += len(line)


def line_starts(folder: Path) -> Sequence[int]:
    """Return the byte at which each line of a run's episodes begins, as `read_appended` takes it."""
    with (folder / EPISODES).open("rb") as lines:
        return list(accumulate(map(len, lines), initial=0))[:-1]


def rewrite_episodes(folder: Path, scored: Callable[[Episode], Episode]) -> None:
    """Replace the reward of every episode of a run, and the hash of its weights, by those that `scored` gives. Call it
    only while holding the folder's `EpisodeStore`, which then cannot be used further.

    Raises:
        SchemaError: as `read_episodes`.
    """
    path, key = folder / EPISODES, lines_of(read_stage(folder)).key
    with replacing(path) as file:
        for _, line in checked_lines(path, read_lines(path)):
            stored = decode_episode(line)
            now = scored(_attach(stored, folder))
            again = msgspec.structs.replace(stored, reward=now.reward, hashes=now.hashes)
            file.write(with_digest(encode_episode(again), key) + b"\n")


def latest_episodes(folder: Path) -> dict[EpisodeKey, Episode]:
    """Return the last episode of each key: one that failed and was run again counts as it ended the last time."""
    return {episode.key: episode for episode in read_episodes(folder)}


def _arrays(episode: Episode) -> Iterator[np.ndarray]:
    for turn in episode.turns:
        for call in turn.calls:
            yield np.asarray(call.output_ids, dtype="<i4")
            yield np.asarray(call.output_logprobs, dtype="<f4")
    for ids in episode.segments.values():
        yield np.asarray(ids, dtype="<i4")


def _detach(episode: Episode, offset: int) -> tuple[Episode, bytes]:
    """Return the episode with a reference to the side file in place of token arrays, and these arrays as bytes."""
    blob, place = to_bytes(tuple(_arrays(episode)), offset)
    if place is None:
        return episode, blob
    turns = _with_calls(episode, _bare)
    segments: dict[str, tuple[int, ...]] = dict.fromkeys(episode.segments, ())
    return msgspec.structs.replace(episode, turns=turns, segments=segments, tokens=place), blob


def _attach(episode: Episode, folder: Path) -> Episode:
    """Undo `_detach`: read token arrays back from the side file."""
    if episode.tokens is None:
        return episode
    parts = unpacked(folder / TOKENS, episode.tokens, f"episode {episode.episode_id}")
    turns = _with_calls(episode, lambda call: _filled(call, parts))
    segments = {name: tuple(next(parts).view("<i4").tolist()) for name in episode.segments}
    return msgspec.structs.replace(episode, turns=turns, segments=segments, tokens=None)


def _with_calls(episode: Episode, changed: Callable[[ModelCall], ModelCall]) -> tuple[Turn, ...]:
    return tuple(msgspec.structs.replace(turn, calls=tuple(map(changed, turn.calls))) for turn in episode.turns)


def _bare(call: ModelCall) -> ModelCall:
    return msgspec.structs.replace(call, output_ids=(), output_logprobs=())


def _filled(call: ModelCall, parts: Iterator[np.ndarray]) -> ModelCall:
    ids = tuple(next(parts).view("<i4").tolist())
    return msgspec.structs.replace(call, output_ids=ids, output_logprobs=tuple(next(parts).view("<f4").tolist()))
