"""Judge which tasks are worth training on, by the rewards of policies that should earn nothing, or everything.

A policy's score on a task is (r - r_noop) / (r_oracle - r_noop). A task is rejected if the oracle does not come near
the reward of an ideal delivery, if scoring is not stable, or if a policy scores without using any retrieval result. The
headroom of a task is the score that the best of the simple policies leaves to be gained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from harness1.config import Config
from harness1.records import Curated, Episode, Gold, Record, RewardRecord, Status, StopReason, UnitId
from harness1.reward import composite
from harness1.reward.measures import Outcome, measure_outcome, targets

NO_OP, ORACLE, TWICE = "no-op", "oracle", "scripted"
"""The ends of the scale, and the policy that is played twice and must do the same again."""
BLIND = (NO_OP, "id-inventor")
"""Policies that ignore the results of searches."""
SEARCHING = ("stop-at-once", "single-shot", "random", "query-repeater", "tool-spammer", "curate-everything", TWICE)
POLICIES = (*BLIND, *SEARCHING, ORACLE)
"""All policies that play a task set."""

ATTAINED = 0.95
"""Share of the ideal that the oracle must attain."""
LEAKED = 0.05
"""The score of a policy that ignores results at which a task is rejected as leaked."""

Reason = Literal["fault", "flat", "unattained", "unstable", "leaked"]
"""`fault`: the infrastructure broke an episode, so nothing is known. `flat`: an ideal delivery earns no more than an
empty one."""
Scoring = Callable[[Episode, Gold], RewardRecord | None]


class TaskAdmission(Record):
    """The judgement of one task; it is rejected if there is any reason."""

    task_id: str
    rejected: tuple[Reason, ...] = ()
    headroom: float = 0.0
    """1 - the best score of the searching policies."""
    attained: float = 0.0
    """The oracle's gain over doing nothing, as a share of the gain of an ideal delivery."""
    scores: dict[str, float] = {}
    """By policy; empty if the oracle gains nothing."""


@dataclass(frozen=True)
class Trial:
    """The outcome of an episode, and its reward, computed twice."""

    outcome: Outcome
    curated: tuple[Curated, ...]
    reward: RewardRecord | None
    again: RewardRecord | None


def scoring_of(config: Config) -> Scoring:
    """Return the scoring of a configuration."""
    return lambda episode, gold: composite(measure_outcome(episode, gold), episode, config, gold)


def trial(episode: Episode, gold: Gold, scoring: Scoring) -> Trial:
    """Score an episode, twice.

    Raises:
        UsageError: the gold is empty.
    """
    return Trial(measure_outcome(episode, gold), episode.curated, scoring(episode, gold), scoring(episode, gold))


def ideal(episode: Episode, gold: Gold, cap: int) -> Episode:
    """Return the episode as if it had delivered exactly one unit for each target. If there are more than `cap`, units
    that hold the answer come first.

    Raises:
        UsageError: the gold is empty.
    """
    wanted = targets(episode.task.task_id, gold, episode.unit)
    units = dict.fromkeys(_member(target, episode) for target in (*wanted.answer, *wanted.relevant))
    chosen = list(units)[:cap]
    return msgspec.structs.replace(
        episode,
        curated=tuple(Curated(unit, "very_high", rank) for rank, unit in enumerate(chosen, 1)),
        pool=tuple(dict.fromkeys((*episode.pool, *chosen))),
        stop_reason=StopReason.END_SEARCH,
        status=Status.COMPLETED,
    )


def admission_of(task_id: str, trials: Mapping[str, Sequence[Trial]], best: RewardRecord | None) -> TaskAdmission:
    """Judge if a task is worth training on.

    Args:
        trials: one of each of `POLICIES`, and two of `TWICE`.
        best: the reward of the ideal delivery.
    """
    played = {policy: found[0].reward for policy, found in trials.items()}
    rewards = {policy: reward.total for policy, reward in played.items() if reward is not None}
    if best is None or any(each.reward is None for found in trials.values() for each in found):
        return TaskAdmission(task_id, ("fault",))
    nothing, gained = rewards[NO_OP], rewards[ORACLE] - rewards[NO_OP]
    reachable = best.total - nothing
    scores = {policy: (total - nothing) / gained for policy, total in rewards.items()} if gained > 0.0 else {}
    attained = gained / reachable if reachable > 0.0 else 0.0
    holds: dict[Reason, bool] = {
        "flat": reachable <= 0.0,
        "unattained": reachable > 0.0 and attained < ATTAINED,
        "unstable": not _is_stable(trials),
        "leaked": any(scores.get(policy, 0.0) >= LEAKED for policy in BLIND),
    }
    headroom = 1.0 - max(scores[policy] for policy in SEARCHING) if scores else 0.0
    return TaskAdmission(task_id, tuple(reason for reason in holds if holds[reason]), headroom, attained, scores)


def _is_stable(trials: Mapping[str, Sequence[Trial]]) -> bool:
    """Return True if scoring is repeatable, and the repeated episodes delivered and scored the same."""
    repeated = trials[TWICE]
    same = all((each.curated, each.reward) == (repeated[0].curated, repeated[0].reward) for each in repeated)
    return same and all(each.reward == each.again for found in trials.values() for each in found)


def _member(target: frozenset[UnitId], episode: Episode) -> UnitId:
    """Return one unit of a target: a delivered one if possible, so that nothing counts twice."""
    return min(target, key=lambda unit: (all(unit != entry.unit_id for entry in episode.curated), unit))
