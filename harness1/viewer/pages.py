"""Writing a viewer file: the episodes of runs are scored, replayed and compressed, by several processes if there are
many, and those that fit are put into one page."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness1.errors import SchemaError, UsageError
from harness1.eval.metrics import MEANINGS
from harness1.eval.run import read_run
from harness1.records import TAGS, Episode, EpisodeKey, Task
from harness1.runs.files import replacing
from harness1.runs.folder import VIEW
from harness1.runs.journal import EPISODES, read_episodes
from harness1.training.log import LOG
from harness1.viewer import work
from harness1.viewer.episode import EpisodeView
from harness1.viewer.html import deflate, page
from harness1.viewer.report import worst_and_best
from harness1.viewer.run_page import EpisodeRow, RunSource, in_order, pairs, row_of, score_episode, with_room
from harness1.viewer.tables import NUMBER_BYTES, Passage, Passages, map_in_order

BATCH = 16  # episodes that are sent to a worker process at a time, along with their run
WORTH_A_POOL = 4_000_000  # minimum bytes of episodes for which worker processes are worth starting


class Made(msgspec.Struct):
    """A processed episode. `data`: its compressed view, if wanted."""

    key: EpisodeKey
    row: EpisodeRow
    data: str | None = None
    passages: list[Passage] = []
    shared: dict[str, str] = {}


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
    scored = score_episode(episode, gold, run.config)
    row = partial(row_of, episode, number, scored, run.tools)
    if not wanted:
        return Made(episode.key, row(None))
    view = EpisodeView(episode, run.config.env, gold, run.tokenizer, run.titles)
    try:
        data = view.as_json(scored[1]) | {"answers": run.answers_to(episode)}
    except SchemaError as error:
        return Made(episode.key, row(str(error)))
    # Old records lack token counts and get those of the replay.
    tokens = sum(turn["tokens"] for turn in data["turns"])
    counted = msgspec.structs.replace(row(view.problem), tokens=tokens)
    return Made(episode.key, counted, deflate(data), view.tables.passages, view.tables.shared)


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


class _Stored(NamedTuple):
    """An episode: its row, and, if it was wanted, its data with the numbers of its passages."""

    row: EpisodeRow
    data: str
    passages: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.data) + NUMBER_BYTES * len(self.passages) + TAG_BYTES


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
    """Write one file with the runs, trainings and recordings of some folders, also of recipes. `episodes`, `tasks`: if
    there are any, it holds these ids alone, but the rows of all. `on_episode`: called with the number so far. Raises as
    `make_episodes`, and UsageError: a folder or an id is unknown, or the file cannot be written, or lies in a run."""

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
    found, shared, passages = list[_Stored](), list[str](), Passages()
    met = count(1)
    for number, run in enumerate(runs):
        made = make_episodes(run, number, is_wanted, workers)
        stored, of_run = _gather(run, made, passages, lambda: on_episode(next(met)))
        found += stored
        shared.append(of_run)
    known = {each.row.episode for each in found}, {each.row.task for each in found}
    if unknown := sorted({*episodes} - known[0] | {*tasks} - known[1]):
        raise UsageError(f"no run has {', '.join(map(repr, unknown[:5]))}: give ids from the list")
    index["pairs"] = pairs(runs)
    fixed = [("r", shared), ("t", trainings), ("s", [text for _, text in sessions])]
    empty = sum(len(part.encode()) for part in page(title, index | {"rows": [each.row for each in found]}))
    used = sum(len(text) + TAG_BYTES for _, tags in fixed for text in tags)
    held = _choose_held(found, passages, max_bytes - empty - used)
    rows = [msgspec.structs.replace(each.row, held=at in held) for at, each in enumerate(found)]
    try:
        with replacing(out) as target:
            whole = page(title, index | {"rows": rows}, _tags(found, passages, sorted(held), fixed))
            target.writelines(part.encode() for part in whole)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error
    problems = sum(row.problem is not None for row in rows)
    return Written(out, out.stat().st_size, len(held), len(rows) - len(held), problems)


def _gather(
    run: RunSource, episodes: Iterable[Made], passages: Passages, on_episode: Callable[[], object]
) -> tuple[list[_Stored], str]:
    """Return the last episode of each key, and the data that they share."""
    latest, shared = dict[EpisodeKey, _Stored](), dict[str, str]()
    for made in episodes:
        shared |= made.shared
        latest[made.key] = _Stored(made.row, made.data or "", passages.numbers(made.passages))
        on_episode()
    return list(latest.values()), deflate(run.shared(shared))


def _choose_held(found: Sequence[_Stored], passages: Passages, room: int) -> set[int]:
    asked = [place for place in in_order([each.row for each in found]) if found[place].data]
    whole = sum(found[place].size for place in asked)
    # Sizes of single passages are upper limits: together they may fit where they seem not to.
    if whole < room:
        whole += sum(len(block) + TAG_BYTES for block in passages.blocks(_passages_of(found, asked)))
        if whole <= room:
            return set(asked)
    return with_room(asked, [(each.size, each.passages) for each in found], passages.sizes, room)


def _passages_of(found: Sequence[_Stored], held: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(number for place in held for number in found[place].passages))


def _tags(
    found: Sequence[_Stored], passages: Passages, held: Sequence[int], fixed: Iterable[tuple[str, Sequence[str]]]
) -> Iterator[tuple[str, str]]:
    for name, texts in fixed:
        yield from ((f"{name}{number}", text) for number, text in enumerate(texts))
    used = _passages_of(found, held)
    yield from ((f"p{number}", text) for number, text in enumerate(passages.blocks(used)))
    numbers = {number: at for at, number in enumerate(used)}
    for at in held:
        yield f"e{at}", f"{found[at].data},{deflate([numbers[number] for number in found[at].passages])}"


def ensure_view(folder: Path, tasks: Sequence[Task]) -> None:
    """Write the viewer file of a run, unless it exists, with its worst and best tasks alone, which is soon done."""
    if not (folder / VIEW).is_file():
        worst, best = worst_and_best(read_run(folder, tasks=tasks).per_task)
        if worst:
            write_view([folder], folder / VIEW, tasks=[*worst, *best], workers=1)
