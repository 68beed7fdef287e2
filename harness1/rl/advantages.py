"""Compute advantages of episodes over others on the same task."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

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
