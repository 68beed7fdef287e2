"""Make the rows of a policy gradient from groups of episodes: rewards become advantages, and calls become rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from random import Random

import msgspec

from harness1.config import Rl
from harness1.records import Episode, Status
from harness1.rl.advantages import advantages, discounted
from harness1.rl.rollouts import EpisodeGroup
from harness1.rows.calls import CapturedCall, captured_calls
from harness1.rows.merging import prefix_merging
from harness1.rows.row import TrainRow, per_request
from harness1.training.micro_batch import trained_tokens


def trainable(group: EpisodeGroup) -> tuple[Episode, ...]:
    """Return the episodes of a group that have a reward and log probabilities. The others, broken by the infrastructure
    or not scored, are left out of baselines and rows; episodes that the policy failed stay."""
    return tuple(
        episode
        for episode in group.episodes
        if episode.status is not Status.INFRA_ERROR and episode.reward is not None and episode.untrainable is None
    )


def rewards_of(episodes: Sequence[Episode]) -> list[float]:
    """Return the rewards of the episodes that have one."""
    return [episode.reward.total for episode in episodes if episode.reward is not None]


def training_rows(groups: Sequence[EpisodeGroup], rl: Rl) -> list[TrainRow]:
    """Make the rows of a batch, in the order of groups, of their episodes and of the turns. `group_id` is the group's
    index as text.

    The `token_weight` of all trained tokens add up to their number (`token_mean`), to the number of episodes with such
    tokens (`trajectory_mean`), or to the number of groups (`group_mean`), regardless of how rows are cut.

    Args:
        groups: the whole batch, because `batch_std` is taken over all of it.

    Raises:
        SchemaError: an episode lacks a part of a prompt.
    """
    ordered = sorted(groups, key=lambda group: group.index)
    sampled = [trainable(group) for group in ordered]
    earned = advantages([rewards_of(episodes) for episodes in sampled], rl.advantages)
    rows: list[TrainRow] = []
    for group, episodes, of_episodes in zip(ordered, sampled, earned, strict=True):
        made = []
        for episode, advantage in zip(episodes, of_episodes, strict=True):
            of_turns = discounted(advantage, len(episode.turns), rl.discount)
            made.append(_episode_rows(episode, of_turns, str(group.index), rl))
        rows += _weighted(made, rl)
    return rows


def substeps(rows: Sequence[TrainRow], count: int, seed: int | str) -> list[list[TrainRow]]:
    """Cut a batch into optimizer steps of whole groups, drawn by the seed; their sizes differ by one group at most. A
    batch of fewer groups makes fewer steps, none of them empty.

    Args:
        rows: in the order of `training_rows`.
    """
    groups = [list(own) for _, own in groupby(rows, key=lambda row: row.group_id)]
    Random(f"substeps/{seed}").shuffle(groups)
    steps = min(count, len(groups))
    return [[row for group in groups[at::steps] for row in group] for at in range(steps)]


def _episode_rows(episode: Episode, of_turns: Sequence[float], group_id: str, rl: Rl) -> list[TrainRow]:
    """Make the rows of an episode in the order of its turns, with advantages."""
    calls = {call.call_id: call for call in captured_calls(episode)}
    made = per_request(calls.values(), group_id) if rl.rows == "turn" else prefix_merging(calls.values(), group_id).rows
    order = {name: place for place, name in enumerate(calls)}
    values = {
        f"{episode.episode_id}/{call.call_id}": advantage
        for turn, advantage in zip(episode.turns, of_turns, strict=True)
        for call in turn.calls
    }
    return [_stamped(row, calls, values) for row in sorted(made, key=lambda row: order[row.call_ids[0]])]


def _stamped(row: TrainRow, calls: Mapping[str, CapturedCall], values: Mapping[str, float]) -> TrainRow:
    """Set the advantage of each call on its output, and 0 elsewhere."""
    stamped = [0.0] * len(row.token_ids)
    for name in row.call_ids:
        begin, outputs = len(calls[name].prompt_ids), len(calls[name].output_ids)
        stamped[begin : begin + outputs] = [values[name]] * outputs
    return msgspec.structs.replace(row, advantages=tuple(stamped))


def _weighted(made: Sequence[Sequence[TrainRow]], rl: Rl) -> list[TrainRow]:
    """Join the rows of a group, with the weights of their tokens."""
    tokens = [sum(map(trained_tokens, rows)) for rows in made]
    if rl.normaliser == "token_mean":
        return [row for rows in made for row in rows]
    if rl.normaliser == "group_mean":
        tokens = [sum(tokens)] * len(tokens)
    return [
        msgspec.structs.replace(row, token_weight=1 / total)
        for rows, total in zip(made, tokens, strict=True)
        for row in rows
    ]
