"""Writing a viewer file: the episodes of runs are scored, replayed and compressed, by several processes if there are
many, and those that fit are put into one page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import SchemaError, UsageError
from harness1.eval.metrics import MEANINGS, measure_episode, metrics_of_nothing
from harness1.records import TAGS, Episode, EpisodeKey, Status, Task
from harness1.runs.files import replacing
from harness1.runs.folder import VIEW
from harness1.runs.journal import EPISODES, read_episodes
from harness1.training.log import LOG
from harness1.viewer import work
from harness1.viewer.episode import EpisodeView
from harness1.viewer.html import deflate, page
from harness1.viewer.report import read_report
from harness1.viewer.run_page import EpisodeRow, Measured, RunSource, in_order, pairs, row_of, score_episode, with_room
from harness1.viewer.tables import NUMBER_BYTES, Passage, Passages, Place, Spool, map_in_order

BATCH = 16  # episodes that are sent to a worker process at a time, along with their run
WORTH_A_POOL = 4_000_000  # minimum bytes of episodes for which worker processes are worth starting


class Made(msgspec.Struct):
    """A processed episode. `data`: its compressed view, if wanted. `measured`: empty if it cannot be scored."""

    key: EpisodeKey
    row: EpisodeRow
    data: str | None = None
    passages: list[Passage] = []
    shared: dict[str, str] = {}
    measured: dict[str, float] = {}


def make_episodes(run: RunSource, number: int, wants: Callable[[Episode], bool], workers: int) -> Iterator[Made]:
    """Yield every recorded episode of the run of that number; a key may come again, and its last episode counts.
    `workers`: 0: one per core. Raises SchemaError: a record is damaged; InfrastructureFault: a worker process died."""
    items = ((episode, wants(episode)) for episode in read_episodes(run.folder))
    batches = iter(lambda: list(islice(items, BATCH)), [])
    few = (run.folder / EPISODES).is_file() and (run.folder / EPISODES).stat().st_size < WORTH_A_POOL
    processes = 1 if few else workers or os.cpu_count() or 1
    return chain.from_iterable(map_in_order(partial(_make_batch, run, number), batches, processes))


def _make_batch(run: RunSource, number: int, items: Sequence[tuple[Episode, bool]]) -> list[Made]:
    return [make_episode(run, number, item) for item in items]


def make_episode(run: RunSource, number: int, item: tuple[Episode, bool]) -> Made:
    """Score an episode, and replay and compress it if requested."""
    episode, wanted = item
    gold = run.gold_of(episode.task)
    outcome, reward = score_episode(episode, gold, run.config)
    row = partial(row_of, episode, number, (outcome, reward), run.tools)
    metrics = {} if outcome is None else measure_episode(outcome, episode, gold, run.config)
    if episode.status is Status.INFRA_ERROR and gold is not None and run.faults == "zero":
        metrics = metrics_of_nothing(msgspec.structs.replace(episode.task, gold=gold), run.config)
    if not wanted:
        return Made(episode.key, row(None), measured=metrics)
    view = EpisodeView(episode, run.config.env, gold, run.tokenizer, run.titles)
    try:
        data = view.as_json(reward) | {"answers": run.answers_to(episode)}
    except SchemaError as error:
        return Made(episode.key, row(str(error)), measured=metrics)
    # Old records lack token counts and get those of the replay.
    tokens = sum(turn["tokens"] for turn in data["turns"])
    counted = msgspec.structs.replace(row(view.problem), tokens=tokens)
    return Made(episode.key, counted, deflate(data), view.tables.passages, view.tables.shared, metrics)


TAG_BYTES = 80  # upper limit of a script tag without its content
Listener = Callable[[int], None]


@dataclass(frozen=True)
class Written:
    """The contents of a viewer file, its size in bytes, and the number of episodes that are only in its list."""

    path: Path
    size: int
    episodes: int
    left_out: int
    problems: int


@dataclass(frozen=True)
class _Stored:
    place: Place
    passages: Sequence[int]

    @property
    def size(self) -> int:
        return self.place[1] + NUMBER_BYTES * len(self.passages) + TAG_BYTES


@dataclass
class _Gathered:
    spool: Spool
    passages: Passages
    rows: list[EpisodeRow] = field(default_factory=list)
    episodes: list[_Stored | None] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)


def write_view(
    folders: Sequence[Path],
    out: Path,
    on_episode: Listener = lambda _: None,
    *,
    episodes: Collection[str] = (),
    tasks: Collection[str] = (),
    max_bytes: int = 60_000_000,
    workers: int = 0,
) -> Written:
    """Write one file with the runs, trainings and recordings of some folders, and of the stages of a recipe, replacing
    an earlier file atomically. If ids of `episodes` or `tasks` are given, it holds only these, but the rows of all.
    `on_episode`: called with the number of episodes so far. Raises as `make_episodes`, and UsageError: a folder holds
    none of these, an id is unknown, or the file cannot be written or lies in a run that is not the only one."""

    def is_wanted(episode: Episode) -> bool:
        return episode.episode_id in episodes or episode.task.task_id in tasks or not (episodes or tasks)

    home = out.resolve().parent
    if (home / EPISODES).is_file() and any(each.resolve() != home for each in folders):
        raise UsageError(f"{out} lies in a run, and would be published with it: a page of others needs another --out")
    title = " · ".join(folder.resolve().name for folder in folders)
    parts = [part for each in folders for part in (work.parts_on_disk(each) if work.is_recipe(each) else [each])]
    trained = [part for part in parts if (part / LOG).is_file()]
    trainings = [deflate(work.training_card(part)) for part in trained]
    recordings = [part for part in parts if work.is_recording(part)]
    runs = [RunSource.open(part) for part in parts if part not in trained and part not in recordings]
    sessions = work.hold_sessions(recordings, max_bytes // 2)
    index = {
        "recipes": [work.recipe_card(folder) for folder in folders if work.is_recipe(folder)],
        "columns": EpisodeRow.__struct_fields__,
        "runs": [run.card for run in runs],
        "trainings": list(map(work.training_row, trained)),
        "sessions": [row for row, _ in sessions],
        "tags": TAGS,
        "classes": MEANINGS,
    }
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as texts:
        found = _Gathered(Spool(file), Passages(Spool(texts)))
        made = (make_episodes(run, number, is_wanted, workers) for number, run in enumerate(runs))
        measured = [_gather(run, each, found, on_episode) for run, each in zip(runs, made, strict=True)]
        known = {row.episode for row in found.rows}, {row.task for row in found.rows}
        if unknown := sorted({*episodes} - known[0] | {*tasks} - known[1]):
            raise UsageError(f"no run has {', '.join(map(repr, unknown[:5]))}: give ids from the list")
        index["pairs"] = pairs(runs, measured)
        fixed = [("r", found.shared), ("t", trainings), ("s", [text for _, text in sessions])]
        empty = sum(len(part.encode()) for part in page(title, index | {"rows": found.rows}))
        used = sum(len(text) + TAG_BYTES for _, tags in fixed for text in tags)
        held = _choose_held(found, max_bytes - empty - used)
        rows = [msgspec.structs.replace(row, held=at in held) for at, row in enumerate(found.rows)]
        try:
            with replacing(out) as target:
                whole = page(title, index | {"rows": rows}, _tags(found, held, fixed))
                target.writelines(part.encode() for part in whole)
        except OSError as error:
            raise UsageError(f"{out} cannot be written: {error.strerror}") from error
    problems = sum(row.problem is not None for row in rows)
    return Written(out, out.stat().st_size, len(held), len(rows) - len(held), problems)


def _gather(run: RunSource, episodes: Iterable[Made], found: _Gathered, on_episode: Listener) -> Measured:
    latest: dict[EpisodeKey, int] = {}
    measured: dict[EpisodeKey, dict[str, float]] = {}
    shared: dict[str, str] = {}
    for made in episodes:
        shared |= made.shared
        measured[made.key] = made.measured
        stored = None
        if made.data is not None:
            stored = _Stored(found.spool.put(made.data.encode()), found.passages.numbers(made.passages))
        if made.key in latest:
            found.rows[latest[made.key]], found.episodes[latest[made.key]] = made.row, stored
            continue
        latest[made.key] = len(found.rows)
        found.rows.append(made.row)
        found.episodes.append(stored)
        on_episode(len(found.rows))
    found.shared.append(deflate(run.shared(shared)))
    return measured


def _choose_held(found: _Gathered, room: int) -> set[int]:
    asked = [place for place in in_order(found.rows) if found.episodes[place] is not None]
    whole = sum(stored.size for stored in found.episodes if stored is not None)
    # Sizes of single passages are upper limits: together they may fit where they seem not to.
    if whole < room:
        whole += sum(len(block) + TAG_BYTES for block in found.passages.blocks(_passages_of(found, asked)))
        if whole <= room:
            return set(asked)
    sizes = [(stored.size, stored.passages) if stored else (0, ()) for stored in found.episodes]
    return with_room(asked, sizes, found.passages.sizes, room)


def _passages_of(found: _Gathered, held: Iterable[int]) -> list[int]:
    stored = (found.episodes[place] for place in held)
    return list(dict.fromkeys(number for each in stored if each is not None for number in each.passages))


def _tags(
    found: _Gathered, held: Collection[int], fixed: Iterable[tuple[str, Sequence[str]]]
) -> Iterator[tuple[str, str]]:
    for name, texts in fixed:
        yield from ((f"{name}{number}", text) for number, text in enumerate(texts))
    used = _passages_of(found, sorted(held))
    numbers = {number: at for at, number in enumerate(used)}
    yield from ((f"p{number}", text) for number, text in enumerate(found.passages.blocks(used)))
    for at in sorted(held):
        if (stored := found.episodes[at]) is not None:
            passages: Any = [numbers[number] for number in stored.passages]
            yield f"e{at}", f"{found.spool.get(*stored.place).decode()},{deflate(passages)}"


def ensure_view(folder: Path, tasks: Sequence[Task], max_bytes: int) -> None:
    """Write the viewer file of a run, unless it exists, with its worst and best tasks alone, which is soon done."""
    if (folder / VIEW).is_file():
        return
    worst, best = read_report(folder, tasks).worst_and_best
    if worst:
        write_view([folder], folder / VIEW, tasks=[*worst, *best], max_bytes=max_bytes, workers=1)
