"""Writing a viewer file: every episode is replayed once, and those that fit are put into one page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path

import msgspec

from harness1.errors import SchemaError, UsageError
from harness1.records import TAGS, Episode, EpisodeKey
from harness1.runs.files import replacing
from harness1.runs.store import EPISODES, read_episodes
from harness1.viewer.episode_list import EpisodeRow, in_order, row_of, scored, with_room
from harness1.viewer.episode_view import EpisodeView
from harness1.viewer.failure import MEANINGS
from harness1.viewer.page_file import deflated, page
from harness1.viewer.run_source import RunSource
from harness1.viewer.spool import Spool, mapped
from harness1.viewer.training import is_training, training_card

TAG_BYTES = 80
"""Upper limit of a script tag without its content."""
BATCH = 16
"""Episodes that are sent to a worker process at a time, along with their run."""
WORTH_A_POOL = 4_000_000
"""Minimum bytes of episodes for which worker processes are worth starting."""
Listener = Callable[[int], None]


@dataclass(frozen=True)
class Asked:
    """The options of a viewer file. If ids of episodes or tasks are given, the file holds only these episodes, but the
    rows of all."""

    folders: Sequence[Path]
    episodes: Collection[str] = ()
    tasks: Collection[str] = ()
    max_bytes: int = 60_000_000
    workers: int = 0
    """Number of processes; 0 for one per core."""

    def wants(self, episode: Episode) -> bool:
        if not self.episodes and not self.tasks:
            return True
        return episode.episode_id in self.episodes or episode.task.task_id in self.tasks


@dataclass(frozen=True)
class Written:
    """The contents of a viewer file, its size in bytes, and the number of episodes that are only in its list."""

    path: Path
    size: int
    episodes: int
    left_out: int
    problems: int


@dataclass
class _Gathered:
    """The rows of all runs, and the places of their episodes in the spool (None if not requested)."""

    spool: Spool
    rows: list[EpisodeRow] = field(default_factory=list)
    places: list[tuple[int, int] | None] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)


class _Made(msgspec.Struct):
    """An episode processed by a worker."""

    key: EpisodeKey
    row: EpisodeRow
    blob: str | None = None
    shared: dict[str, str] = {}


def write_view(asked: Asked, out: Path, on_episode: Listener = lambda _: None) -> Written:
    """Write one file with the runs and trainings of some folders, replacing an earlier file atomically.

    Args:
        on_episode: called with the number of episodes replayed so far.

    Raises:
        UsageError: a folder holds neither, an id is unknown, or the file cannot be written.
        SchemaError: a record is damaged.
        InfrastructureFault: a worker process died.
    """
    trainings = [training_card(folder) for folder in asked.folders if is_training(folder)]
    runs = [RunSource.open(folder) for folder in asked.folders if not is_training(folder)]
    names = [training["name"] for training in trainings]
    title = " · ".join([*(run.name for run in runs), *names])
    index = {
        "columns": EpisodeRow.__struct_fields__,
        "runs": [run.card for run in runs],
        "trainings": names,
        "tags": TAGS,
        "classes": MEANINGS,
    }
    with tempfile.TemporaryFile() as file:
        found = _Gathered(Spool(file))
        for number, run in enumerate(runs):
            _gather(run, number, asked, found, on_episode)
        _refuse_unknown(asked, found.rows)
        curves = [deflated(training) for training in trainings]
        empty = sum(len(part.encode()) for part in page(title, index | {"rows": found.rows}))
        held = _held(found, asked.max_bytes - empty - sum(len(text) + TAG_BYTES for text in [*found.shared, *curves]))
        rows = [msgspec.structs.replace(row, held=at in held) for at, row in enumerate(found.rows)]
        _write(out, page(title, index | {"rows": rows}, _tags(found, held, curves)))
    problems = sum(row.problem is not None for row in rows)
    return Written(out, out.stat().st_size, len(held), len(rows) - len(held), problems)


def _held(found: _Gathered, room: int) -> set[int]:
    """Return the places of the episodes that fit into a number of bytes."""
    asked = [place for place in in_order(found.rows) if found.places[place] is not None]
    return with_room(asked, [place[1] + TAG_BYTES if place else 0 for place in found.places], room)


def _gather(run: RunSource, number: int, asked: Asked, found: _Gathered, on_episode: Listener) -> None:
    """Replay the episodes of one run; the last episode of a key counts."""
    latest: dict[EpisodeKey, int] = {}
    shared: dict[str, str] = {}
    items = ((episode, asked.wants(episode)) for episode in read_episodes(run.folder))
    batches = mapped(partial(_batch, run, number), iter(lambda: list(islice(items, BATCH)), []), _workers(asked, run))
    for made in chain.from_iterable(batches):
        shared |= made.shared
        place = found.spool.put(made.blob) if made.blob is not None else None
        if made.key in latest:
            found.rows[latest[made.key]], found.places[latest[made.key]] = made.row, place
            continue
        latest[made.key] = len(found.rows)
        found.rows.append(made.row)
        found.places.append(place)
        on_episode(len(found.rows))
    found.shared.append(deflated(run.shared(shared)))


def _batch(run: RunSource, number: int, items: Sequence[tuple[Episode, bool]]) -> list[_Made]:
    return [_made(run, number, item) for item in items]


def _made(run: RunSource, number: int, item: tuple[Episode, bool]) -> _Made:
    """Score an episode, and replay and compress it if requested."""
    episode, wanted = item
    gold = run.golds.get(episode.task.task_id)
    result = scored(episode, gold, run.config)
    row = partial(row_of, episode, number, result, run.tools)
    if not wanted:
        return _Made(episode.key, row(None))
    view = EpisodeView(episode, run.config.env, gold, run.tokenizer)
    try:
        data = view.as_json(result.reward)
    except SchemaError as error:
        return _Made(episode.key, row(str(error)))
    # Old records lack token counts and get those of the replay.
    tokens = sum(turn["tokens"] for turn in data["turns"])
    counted = msgspec.structs.replace(row(view.problem), tokens=tokens)
    return _Made(episode.key, counted, deflated(data), view.tables.shared)


def _workers(asked: Asked, run: RunSource) -> int:
    path = run.folder / EPISODES
    if path.is_file() and path.stat().st_size < WORTH_A_POOL:
        return 1
    return asked.workers or os.cpu_count() or 1


def _refuse_unknown(asked: Asked, rows: Sequence[EpisodeRow]) -> None:
    unknown = [*(set(asked.episodes) - {row.episode for row in rows}), *(set(asked.tasks) - {row.task for row in rows})]
    if unknown:
        raise UsageError(f"no run has {', '.join(map(repr, sorted(unknown)[:5]))}: give ids from the list")


def _tags(found: _Gathered, held: Collection[int], trainings: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each tag of data."""
    for name, texts in (("r", found.shared), ("t", trainings)):
        yield from ((f"{name}{number}", text) for number, text in enumerate(texts))
    for at, place in enumerate(found.places):
        if at in held and place is not None:
            yield f"e{at}", found.spool.get(*place)


def _write(out: Path, parts: Iterable[str]) -> None:
    try:
        with replacing(out) as file:
            file.writelines(part.encode() for part in parts)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error
