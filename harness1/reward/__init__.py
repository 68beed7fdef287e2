"""The composite terminal reward: named, capped components and their composition. The components can be named here, such
as `harness1.reward.recall`."""

from harness1.reward.components import (
    answer,
    answer_found,
    answer_missed,
    clutter,
    curation,
    diversity,
    diversity_shortfall,
    outcome,
    recall,
    recall_gap,
    trajectory,
    trajectory_answer,
    turn_penalty,
)

__all__ = [
    "answer",
    "answer_found",
    "answer_missed",
    "clutter",
    "curation",
    "diversity",
    "diversity_shortfall",
    "outcome",
    "recall",
    "recall_gap",
    "trajectory",
    "trajectory_answer",
    "turn_penalty",
]
