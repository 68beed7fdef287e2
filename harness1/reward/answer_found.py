"""The bonus for delivering any evidence of the final answer at all."""

from __future__ import annotations

from harness1.reward.component import Case, component


@component("answer_found", weight=lambda settings: settings.answer_found)
def answer_found(case: Case) -> float:
    """1 where the curated set holds some of the answer's evidence, else 0."""
    return float(case.outcome.answer_recall > 0.0)
