"""The list of episodes of a page: its rows, their order, and the choice of episodes within a size limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from zlib import crc32

import msgspec

from harness1.config import Config
from harness1.errors import UsageError
from harness1.eval.failure import failure_class
from harness1.records import Episode, Gold, RewardRecord, Status
from harness1.reward import composite
from harness1.reward.measures import Outcome, delivered, measure_outcome

QUERY_CHARACTERS = 300
"""Limit of the query in a row; the episode has all of it."""


class EpisodeRow(msgspec.Struct, frozen=True, array_like=True):
    """An episode in the list, with the values to filter by. Undefined numbers are null."""

    run: int
    episode: str
    task: str
    sample: int
    query: str
    status: str
    stop: str
    failure: str
    recall: float | None
    trajectory: float | None
    precision: float | None
    size: int
    turns: int
    tools: int
    """One bit for each name in the run's list of tools, set if the tool was called."""
    reward: float | None
    tokens: int
    """The sum over all contexts of the episode."""
    held: bool = False
    """True if the file contains the episode itself."""
    problem: str | None = None
    """The reason why it cannot be replayed exactly."""
    delivered: int = 0
    """A checksum of the set of delivered units, equal for equal sets."""


class Scored(msgspec.Struct, frozen=True):
    """The outcome and the reward of an episode, if its gold is known."""

    outcome: Outcome | None
    reward: RewardRecord | None


def scored(episode: Episode, gold: Gold | None, config: Config) -> Scored:
    """Return the outcome of an episode, and its recorded reward, or else that of the run's configuration."""
    if gold is None or episode.status is Status.INFRA_ERROR:
        return Scored(None, episode.reward)
    try:
        found = measure_outcome(episode, gold)
    except UsageError:
        return Scored(None, episode.reward)
    return Scored(found, episode.reward or composite(found, episode, config, gold))


def row_of(episode: Episode, run: int, result: Scored, tools: list[str], problem: str | None) -> EpisodeRow:
    """Return the row of an episode; `tools` are the names for the bits of `EpisodeRow.tools`."""
    called = {turn.action.name for turn in episode.turns if turn.action is not None}
    found, reward = result.outcome, result.reward
    return EpisodeRow(
        run=run,
        episode=episode.episode_id,
        task=episode.task.task_id,
        sample=episode.sample_idx,
        query=" ".join(episode.task.query.split())[:QUERY_CHARACTERS],
        status=episode.status.value,
        stop=episode.stop_reason.value,
        failure=failure_class(episode.stop_reason, found).value,
        recall=None if found is None else round(found.recall, 4),
        trajectory=None if found is None else round(found.trajectory_recall, 4),
        precision=None if found is None else round(found.precision, 4),
        size=len(episode.curated),
        turns=len(episode.turns),
        tools=sum(1 << bit for bit, name in enumerate(tools) if name in called),
        reward=None if reward is None else round(reward.total, 4),
        tokens=sum(turn.prompt_tokens for turn in episode.turns),
        problem=problem,
        delivered=crc32("\n".join(sorted(delivered(episode))).encode()),
    )


def in_order(rows: Sequence[EpisodeRow]) -> list[int]:
    """Return the indices of rows in order of interest: tasks with the lowest and with the highest recall alternate.

    The episodes of a task stay together for comparison. An unscored episode counts as recall 0; where all are unscored,
    the latest come first.
    """
    if all(row.recall is None for row in rows):
        return list(reversed(range(len(rows))))
    tasks: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        tasks.setdefault(row.task, []).append(place)
    recall = {task: sum(rows[at].recall or 0.0 for at in places) / len(places) for task, places in tasks.items()}
    ranked = sorted(tasks, key=lambda task: (recall[task], task))
    half = (len(ranked) + 1) // 2
    pairs = zip_longest(ranked[:half], reversed(ranked[half:]))
    return [place for task in chain.from_iterable(pairs) if task is not None for place in tasks[task]]


def with_room(
    order: Iterable[int],
    sizes: Sequence[tuple[int, Sequence[int]]],
    passage_size: Callable[[int], int],
    room: int,
) -> set[int]:
    """Return the places that fit into the room, taken in order; those that do not fit are skipped.

    Args:
        sizes: for each place, its own size and the passages that it needs, which count once for all.
        passage_size: the size of a passage.
    """
    held: set[int] = set()
    there: set[int] = set()
    for place in order:
        own, passages = sizes[place]
        new = set(passages) - there
        size = own + sum(map(passage_size, new))
        if size <= room:
            held.add(place)
            there |= new
            room -= size
    return held
