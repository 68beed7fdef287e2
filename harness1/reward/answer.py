"""Credit for the share of the answer's evidence that was delivered."""

from __future__ import annotations

from harness1.reward.component import Case, component


@component("answer", weight=lambda settings: settings.answer)
def answer(case: Case) -> float:
    """Final-answer recall of the curated set, F."""
    return case.outcome.answer_recall
