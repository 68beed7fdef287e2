"""The penalty for relevant units that were seen and not delivered."""

from __future__ import annotations

from harness1.reward.component import Case, component


@component("recall_gap", weight=lambda settings: -settings.recall_gap)
def recall_gap(case: Case) -> float:
    """max(T - R, 0)."""
    return case.outcome.trajectory_recall - case.outcome.recall
