"""Rows of a policy gradient: rewards of groups become advantages, and calls become rows; the metrics of a batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from random import Random
from statistics import fmean, pstdev, stdev
from typing import Literal

from harness1.config import Rl
from harness1.records import Episode, Gold, Status, StopReason
from harness1.reward import by_term
from harness1.reward.measures import measure_outcome
from harness1.rl.rollouts import EpisodeGroup
from harness1.rows import TrainRow, make_rows
from harness1.rows.calls import calls_for_rows

Kind = Literal["center", "group_std", "batch_std", "leave_one_out"]
SAME = 1e-9  # rewards that differ by at most this count as equal
STD_EPSILON = 1e-4  # added to standard deviations, which divide by n - 1, as in TRL's GRPO


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
    means = [fmean(rewards) if rewards else 0.0 for rewards in groups]
    centred = [[reward - mean for reward in rewards] for rewards, mean in zip(groups, means, strict=True)]

    def scale(values: Sequence[float], over: Sequence[float]) -> list[float]:
        deviation = (stdev(over) if len(over) > 1 else 0.0) + STD_EPSILON
        return [value / deviation for value in values]

    if kind == "center":
        return centred
    if kind == "leave_one_out":  # r - (sum - r) / (n - 1) = n / (n - 1) * (r - mean)
        return [[value * len(values) / max(len(values) - 1, 1) for value in values] for values in centred]
    whole = [value for values in centred for value in values]
    return [scale(values, values if kind == "group_std" else whole) for values in centred]


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
    """Make the rows of a whole batch, in the order of groups, of their episodes and of the turns. `group_id` is the
    group's index as text. Raise SchemaError if an episode lacks a part of a prompt."""
    ordered = sorted(groups, key=lambda group: group.index)
    sampled = [trainable(group) for group in ordered]
    earned = advantages([rewards_of(episodes) for episodes in sampled], rl.advantages)
    rows: list[TrainRow] = []
    for group, episodes, of_episodes in zip(ordered, sampled, earned, strict=True):
        for episode, advantage in zip(episodes, of_episodes, strict=True):
            values = {
                f"{episode.episode_id}/{call.call_id}": advantage for turn in episode.turns for call in turn.calls
            }
            rows += make_rows(calls_for_rows(episode), rl.rows, values, str(group.index))
    return rows


def substeps(rows: Sequence[TrainRow], count: int, seed: int | str) -> list[list[TrainRow]]:
    """Cut the rows of a batch, as `training_rows` orders them, into optimizer steps of whole groups, drawn by the seed;
    their sizes differ by one group at most. A batch of fewer groups makes fewer steps, none of them empty."""
    groups = [list(own) for _, own in groupby(rows, key=lambda row: row.group_id)]
    Random(f"substeps/{seed}").shuffle(groups)
    steps = min(count, len(groups))
    return [[row for group in groups[at::steps] for row in group] for at in range(steps)]


GoldOf = Callable[[Episode], Gold | None]


def batch_metrics(groups: Sequence[EpisodeGroup], version: int, gold_of: GoldOf) -> dict[str, float]:
    """Return the `episode_metrics` of a batch, and `reward_std` (mean deviation within a group), `staleness` (mean) and
    `staleness_max` of the groups, in versions before the one to train."""
    ages = [version - min(each.policy_versions[0] for each in group.episodes) for group in groups]
    within = [pstdev(each.reward.total for each in group.episodes if each.reward) for group in groups]
    return {
        **episode_metrics([each for group in groups for each in group.episodes], gold_of),
        "reward_std": fmean(within),
        "staleness": fmean(ages),
        "staleness_max": float(max(ages)),
    }


def episode_metrics(episodes: Sequence[Episode], gold_of: GoldOf) -> dict[str, float]:
    """Return means over the episodes that the infrastructure did not break; empty if there are none: `reward`, under
    `term/` the contribution of each of its terms, `curated_recall`, `precision`, `set_size`, `turns`, `tool_errors` and
    `format_failures` (shares of turns and of episodes), `ended` (share of episodes that the policy ended itself),
    `output_tokens` of an episode, and under `tool/` the shares of the tools in all turns."""
    whole = [each for each in episodes if each.status is not Status.INFRA_ERROR]
    if not whole:
        return {}
    turns = [turn for each in whole for turn in each.turns if turn.action is not None]
    tools = Counter(turn.action.name for turn in turns if turn.action is not None)
    errors = sum(turn.observation is not None and turn.observation.error is not None for turn in turns)
    terms: defaultdict[str, float] = defaultdict(float)
    for each in whole:
        for name, value in by_term(each.reward).items() if each.reward else ():
            terms[name] += value
    results = [measure_outcome(each, gold) for each in whole if (gold := gold_of(each)) is not None]
    measures = {"curated_recall": "recall", "precision": "precision", "set_size": "set_size"} if results else {}
    outputs = [sum(len(call.output_ids) for turn in each.turns for call in turn.calls) for each in whole]
    return {
        "reward": fmean(each.reward.total if each.reward else 0.0 for each in whole),
        **{f"term/{name}": value / len(whole) for name, value in sorted(terms.items())},
        **{name: fmean(getattr(each, field) for each in results) for name, field in measures.items()},
        "turns": len(turns) / len(whole),
        "tool_errors": errors / max(1, len(turns)),
        "format_failures": fmean(each.status is Status.POLICY_ERROR for each in whole),
        "ended": fmean(each.stop_reason is StopReason.END_SEARCH for each in whole),
        "output_tokens": fmean(outputs),
        **{f"tool/{name}": count / len(turns) for name, count in sorted(tools.items())},
    }
