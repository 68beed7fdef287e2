"""Writes a viewer file: every episode is replayed once, and those that have room are put into one page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path

import msgspec

from harness1.errors import SchemaError, UsageError
from harness1.records import TAGS, Episode, EpisodeKey
from harness1.runs.files import replacing
from harness1.runs.store import EPISODES, read_episodes
from harness1.viewer.episode_list import Row, in_order, row_of, scored, with_room
from harness1.viewer.episode_view import EpisodeView
from harness1.viewer.failure import MEANINGS
from harness1.viewer.page_file import inert, packed, page
from harness1.viewer.run_source import RunSource
from harness1.viewer.spool import Spool, mapped
from harness1.viewer.training import is_training, training_card

TAG_BYTES = 80
"""What a script tag takes beside its content, at most."""
BATCH = 16
"""Episodes that a worker process gets at a time, with all that it must know of their run."""
WORTH_A_POOL = 4_000_000
"""Bytes of episodes for which worker processes are worth their start."""
Listener = Callable[[int], None]


@dataclass(frozen=True)
class Asked:
    """What a user wants to see.

    Attributes:
        episodes, tasks: ids; where either is given, the file holds episodes of these alone, and rows of all.
        max_bytes: of the file.
        workers: processes; 0: as many as there are cores.
    """

    folders: Sequence[Path]
    episodes: Collection[str] = ()
    tasks: Collection[str] = ()
    max_bytes: int = 60_000_000
    workers: int = 0

    def wants(self, episode: Episode) -> bool:
        if not self.episodes and not self.tasks:
            return True
        return episode.episode_id in self.episodes or episode.task.task_id in self.tasks


@dataclass(frozen=True)
class Written:
    """What a viewer file holds: `left_out` episodes stand in its list alone."""

    path: Path
    size: int
    episodes: int
    left_out: int
    problems: int


@dataclass
class _Gathered:
    """The rows of all runs, and where their episodes lie in the spool (None: not asked for)."""

    spool: Spool
    rows: list[Row] = field(default_factory=list)
    places: list[tuple[int, int] | None] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)


class _Made(msgspec.Struct):
    """What a worker makes of one episode."""

    key: EpisodeKey
    row: Row
    blob: str | None
    shared: dict[str, str]


def write_view(asked: Asked, out: Path, on_episode: Listener = lambda _: None) -> Written:
    """Write one file with the runs and trainings of some folders. An earlier file is replaced in one step.

    Args:
        on_episode: called with the number of episodes replayed so far.

    Raises:
        UsageError: a folder holds neither, an id is unknown, or the file cannot be written.
        SchemaError: a record is damaged.
        InfrastructureFault: a worker process died.
    """
    trainings = [training_card(folder) for folder in asked.folders if is_training(folder)]
    runs = [RunSource.open(folder) for folder in asked.folders if not is_training(folder)]
    with tempfile.TemporaryFile() as file:
        found = _Gathered(Spool(file))
        for number, run in enumerate(runs):
            _gather(run, number, asked, found, on_episode)
        _refuse_unknown(asked, found.rows)
        curves = [packed(training) for training in trainings]
        names = [training["name"] for training in trainings]
        held = _held(found, curves, _page(out, runs, names, found.rows), asked.max_bytes)
        rows = [msgspec.structs.replace(row, held=at in held) for at, row in enumerate(found.rows)]
        head, tail = _page(out, runs, names, rows)
        _write(out, head, _tags(found, held, curves), tail)
    problems = sum(row.problem is not None for row in found.rows)
    return Written(out, out.stat().st_size, len(held), len(found.rows) - len(held), problems)


def _page(out: Path, runs: Sequence[RunSource], trainings: Sequence[str], rows: Sequence[Row]) -> tuple[str, str]:
    index = {
        "columns": Row.__struct_fields__,
        "rows": rows,
        "runs": [run.card for run in runs],
        "trainings": trainings,
        "tags": TAGS,
        "classes": MEANINGS,
    }
    return page(" · ".join([*(run.name for run in runs), *trainings]), index)


def _held(found: _Gathered, curves: Sequence[str], empty: tuple[str, str], most: int) -> set[int]:
    """The places of the episodes that fit into a file beside its page, what runs share and the curves."""
    fixed = [*found.shared, *curves]
    room = most - sum(len(part.encode()) for part in empty) - sum(len(text) + TAG_BYTES for text in fixed)
    asked = [place for place in in_order(found.rows) if found.places[place] is not None]
    return with_room(asked, [place[1] + TAG_BYTES if place else 0 for place in found.places], room)


def _gather(run: RunSource, number: int, asked: Asked, found: _Gathered, on_episode: Listener) -> None:
    """Replay the episodes of one run; of one that was run again, the last counts."""
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
    found.shared.append(packed(run.shared(shared)))


def _batch(run: RunSource, number: int, items: Sequence[tuple[Episode, bool]]) -> list[_Made]:
    return [_made(run, number, item) for item in items]


def _made(run: RunSource, number: int, item: tuple[Episode, bool]) -> _Made:
    """One episode replayed, scored and packed; only scored if it is not asked for."""
    episode, wanted = item
    gold = run.golds.get(episode.task.task_id)
    result = scored(episode, gold, run.config)
    tools = run.tools
    if not wanted:
        return _Made(episode.key, row_of(episode, number, result, tools, None), None, {})
    view = EpisodeView(episode, run.config.env, gold, run.tokenizer)
    try:
        data = view.plain(result.reward)
    except SchemaError as error:
        return _Made(episode.key, row_of(episode, number, result, tools, str(error)), None, {})
    row = row_of(episode, number, result, tools, view.problem)
    # Records from before tokens were counted get the counts of the replay.
    tokens = sum(turn["tokens"] for turn in data["turns"])
    return _Made(episode.key, msgspec.structs.replace(row, tokens=tokens), packed(data), view.tables.shared)


def _workers(asked: Asked, run: RunSource) -> int:
    path = run.folder / EPISODES
    if path.is_file() and path.stat().st_size < WORTH_A_POOL:
        return 1
    return asked.workers or os.cpu_count() or 1


def _refuse_unknown(asked: Asked, rows: Sequence[Row]) -> None:
    unknown = [*(set(asked.episodes) - {row.episode for row in rows}), *(set(asked.tasks) - {row.task for row in rows})]
    if unknown:
        raise UsageError(f"no run has {', '.join(map(repr, sorted(unknown)[:5]))}: give ids that the list shows")


def _tags(found: _Gathered, held: Collection[int], trainings: Sequence[str]) -> Iterator[str]:
    for name, texts in (("r", found.shared), ("t", trainings)):
        yield from (inert(f"{name}{number}", text) for number, text in enumerate(texts))
    for at, place in enumerate(found.places):
        if at in held and place is not None:
            yield inert(f"e{at}", found.spool.get(*place))


def _write(out: Path, head: str, tags: Iterator[str], tail: str) -> None:
    try:
        with replacing(out) as file:
            file.writelines(part.encode() for part in chain([head], tags, [tail]))
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error
