"""The episodes of a run, scored, replayed and compressed, by several processes if there are many."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

import msgspec

from harness1.errors import SchemaError
from harness1.eval.summary import measured, metrics_of_nothing
from harness1.records import Episode, EpisodeKey, Status
from harness1.runs.journal import EPISODES, read_episodes
from harness1.viewer.episode_list import EpisodeRow, row_of, scored
from harness1.viewer.episode_view import EpisodeView
from harness1.viewer.page_file import deflated
from harness1.viewer.passages import Passage
from harness1.viewer.run_source import RunSource
from harness1.viewer.spool import mapped

BATCH = 16
"""Episodes that are sent to a worker process at a time, along with their run."""
WORTH_A_POOL = 4_000_000
"""Minimum bytes of episodes for which worker processes are worth starting."""


class Made(msgspec.Struct):
    """An episode processed by a worker."""

    key: EpisodeKey
    row: EpisodeRow
    data: str | None = None
    """Its compressed view, or None if it is only listed."""
    passages: list[Passage] = []
    shared: dict[str, str] = {}
    measured: dict[str, float] = {}
    """Its metrics; empty if it cannot be scored."""


def made_episodes(run: RunSource, number: int, wants: Callable[[Episode], bool], workers: int) -> Iterator[Made]:
    """Yield every recorded episode of a run in order; a key may come again, and its last episode counts.

    Args:
        number: the place of the run in the file.
        wants: whether an episode is viewed or only listed.
        workers: number of processes; 0 for one per core.

    Raises:
        SchemaError: a record is damaged.
        InfrastructureFault: a worker process died.
    """
    items = ((episode, wants(episode)) for episode in read_episodes(run.folder))
    batches = iter(lambda: list(islice(items, BATCH)), [])
    return chain.from_iterable(mapped(partial(_batch, run, number), batches, _processes(workers, run)))


def _batch(run: RunSource, number: int, items: Sequence[tuple[Episode, bool]]) -> list[Made]:
    return [made_episode(run, number, item) for item in items]


def made_episode(run: RunSource, number: int, item: tuple[Episode, bool]) -> Made:
    """Score an episode, and replay and compress it if requested."""
    episode, wanted = item
    gold = run.gold_of(episode.task)
    result = scored(episode, gold, run.config)
    row = partial(row_of, episode, number, result, run.tools)
    metrics = {} if result.outcome is None else measured(result.outcome, episode, gold, run.config)
    if episode.status is Status.INFRA_ERROR and gold is not None and run.faults == "zero":
        metrics = metrics_of_nothing(msgspec.structs.replace(episode.task, gold=gold), run.config)
    if not wanted:
        return Made(episode.key, row(None), measured=metrics)
    view = EpisodeView(episode, run.config.env, gold, run.tokenizer, run.titles)
    try:
        data = view.as_json(result.reward)
    except SchemaError as error:
        return Made(episode.key, row(str(error)), measured=metrics)
    # Old records lack token counts and get those of the replay.
    tokens = sum(turn["tokens"] for turn in data["turns"])
    counted = msgspec.structs.replace(row(view.problem), tokens=tokens)
    return Made(episode.key, counted, deflated(data), view.tables.passages, view.tables.shared, metrics)


def _processes(workers: int, run: RunSource) -> int:
    path = run.folder / EPISODES
    if path.is_file() and path.stat().st_size < WORTH_A_POOL:
        return 1
    return workers or os.cpu_count() or 1
