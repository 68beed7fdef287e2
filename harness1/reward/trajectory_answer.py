"""Credit for the share of the answer's evidence that was seen, curated or not."""

from __future__ import annotations

from harness1.reward.component import Case, component


@component("trajectory_answer", weight=lambda settings: settings.trajectory_answer)
def trajectory_answer(case: Case) -> float:
    """Final-answer recall of the trajectory, TF."""
    return case.outcome.trajectory_answer_recall
