"""Credit for evidence that was seen, curated or not."""

from __future__ import annotations

from harness1.reward.component import Case, component


@component("trajectory", weight=lambda settings: settings.trajectory)
def trajectory(case: Case) -> float:
    """Trajectory recall, T."""
    return case.outcome.trajectory_recall
