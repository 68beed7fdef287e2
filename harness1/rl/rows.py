"""Compute advantages of episodes over others on the same task."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from random import Random
from statistics import fmean, pstdev, stdev
from typing import Literal

import msgspec

from harness1.config import Rl
from harness1.records import Episode, Gold, Status, StopReason
from harness1.reward import by_term
from harness1.reward.measures import measure_outcome
from harness1.rl.rollouts import EpisodeGroup
from harness1.rows import TrainRow, make_rows
from harness1.rows.calls import captured_calls
from harness1.training.trainer import trained_tokens

Kind = Literal["center", "group_std", "batch_std", "leave_one_out"]

SAME = 1e-9
"""Rewards that differ by at most this count as equal."""
STD_EPSILON = 1e-4
"""Added to standard deviations, which divide by n - 1, as in TRL's GRPO."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group differ; otherwise all its advantages are 0."""
    return bool(rewards) and max(rewards) - min(rewards) > SAME


def advantages(groups: Sequence[Sequence[float]], kind: Kind) -> list[list[float]]:
    """Return the advantage of each episode, given the rewards of each group of a batch; a group of one has 0.

    - `center`: r - mean of the group (Dr. GRPO, arXiv 2503.20783).
    - `group_std`: `center`, divided by the standard deviation of the group's rewards (GRPO, arXiv 2402.03300).
    - `batch_std`: `center`, divided by the standard deviation of the centred rewards of all groups (REINFORCE++ with a
      baseline, arXiv 2501.03262), so that the difficulty of tasks has no effect.
    - `leave_one_out`: r - mean of the others in the group (RLOO, arXiv 2402.14740).
    """
    centred = [_centred(rewards) for rewards in groups]
    match kind:
        case "center":
            return centred
        case "group_std":
            return [_scaled(values, _deviation(values)) for values in centred]
        case "batch_std":
            deviation = _deviation([value for values in centred for value in values])
            return [_scaled(values, deviation) for values in centred]
        case "leave_one_out":
            # r - (sum - r) / (n - 1) = n / (n - 1) * (r - mean)
            return [[value * len(values) / max(len(values) - 1, 1) for value in values] for values in centred]


def discounted(advantage: float, turns: int, discount: float) -> list[float]:
    """Return the advantage of each turn of an episode whose reward comes with its last one: `discount`^k times the
    episode's, k turns before the end. These are the returns G_t = r_t + `discount` G_(t+1) over interactions of IPA
    (ROLL, arXiv 2512.24873), taken of the reward after its baseline."""
    return [advantage * discount**left for left in reversed(range(turns))]


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = fmean(rewards) if rewards else 0.0
    return [reward - mean for reward in rewards]


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _scaled(values: Sequence[float], deviation: float) -> list[float]:
    return [value / (deviation + STD_EPSILON) for value in values]


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
    """Make the rows of an episode in the order of its turns, with the advantage of its turn at each trained token."""
    values = {
        f"{episode.episode_id}/{call.call_id}": advantage
        for turn, advantage in zip(episode.turns, of_turns, strict=True)
        for call in turn.calls
    }
    return make_rows(captured_calls(episode), rl.rows, group_id, values)


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


GoldOf = Callable[[Episode], Gold | None]


def batch_metrics(groups: Sequence[EpisodeGroup], version: int, gold_of: GoldOf) -> dict[str, float]:
    """Return means over the episodes of a batch, and its staleness.

    Args:
        version: the version of the weights to train.

    Returns:
        The values of `episode_metrics`, and `reward_std` (mean deviation within a group), `staleness` (mean) and
        `staleness_max` of the groups, in versions.
    """
    ages = [version - min(each.policy_versions[0] for each in group.episodes) for group in groups]
    within = [pstdev(each.reward.total for each in group.episodes if each.reward) for group in groups]
    return {
        **episode_metrics([each for group in groups for each in group.episodes], gold_of),
        "reward_std": fmean(within),
        "staleness": fmean(ages),
        "staleness_max": float(max(ages)),
    }


def episode_metrics(episodes: Sequence[Episode], gold_of: GoldOf) -> dict[str, float]:
    """Return means over the episodes that the infrastructure did not break; empty if there are none.

    Returns:
        `reward`, and under `term/` the contribution of each of its terms; `curated_recall`, `precision`, `set_size`,
        `turns`, `tool_errors` and `format_failures` (shares of turns and of episodes), `ended` (share of episodes that
        the policy ended itself), `output_tokens` of an episode, and under `tool/` the shares of the tools in all turns.
    """
    whole = [each for each in episodes if each.status is not Status.INFRA_ERROR]
    if not whole:
        return {}
    turns = [turn for each in whole for turn in each.turns if turn.action is not None]
    tools = Counter(turn.action.name for turn in turns if turn.action is not None)
    errors = sum(turn.observation is not None and turn.observation.error is not None for turn in turns)
    outputs = [sum(len(call.output_ids) for turn in each.turns for call in turn.calls) for each in whole]
    return {
        "reward": fmean(each.reward.total if each.reward else 0.0 for each in whole),
        **_terms(whole),
        **_outcomes([(each, gold) for each in whole if (gold := gold_of(each)) is not None]),
        "turns": len(turns) / len(whole),
        "tool_errors": errors / max(1, len(turns)),
        "format_failures": fmean(each.status is Status.POLICY_ERROR for each in whole),
        "ended": fmean(each.stop_reason is StopReason.END_SEARCH for each in whole),
        "output_tokens": fmean(outputs),
        **{f"tool/{name}": count / len(turns) for name, count in sorted(tools.items())},
    }


def _outcomes(scored: Sequence[tuple[Episode, Gold]]) -> dict[str, float]:
    """Return means over the episodes whose gold is known."""
    results = [measure_outcome(episode, gold) for episode, gold in scored]
    if not results:
        return {}
    return {
        "curated_recall": fmean(each.recall for each in results),
        "precision": fmean(each.precision for each in results),
        "set_size": fmean(each.set_size for each in results),
    }


def _terms(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the contribution of each term to the mean reward; an override replaces all terms."""
    added: defaultdict[str, float] = defaultdict(float)
    for episode in episodes:
        for name, value in by_term(episode.reward).items() if episode.reward else ():
            added[name] += value
    return {f"term/{name}": value / len(episodes) for name, value in sorted(added.items())}
