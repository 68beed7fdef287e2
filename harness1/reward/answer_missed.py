"""The penalty for evidence of the answer that was seen and not delivered."""

from __future__ import annotations

from harness1.reward.component import Case, component


@component("answer_missed", weight=lambda settings: -settings.answer_missed)
def answer_missed(case: Case) -> float:
    """max(TF - F, 0)."""
    return case.outcome.trajectory_answer_recall - case.outcome.answer_recall
