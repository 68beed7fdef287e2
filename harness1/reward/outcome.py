"""The main term: how good the curated set is."""

from __future__ import annotations

from harness1.eval.outcome import f_beta
from harness1.reward.component import Case, component


@component("outcome", weight=lambda settings: settings.outcome)
def outcome(case: Case) -> float:
    """F_beta of curated precision and recall; with beta above 1, recall weighs more."""
    return f_beta(case.outcome.precision, case.outcome.recall, case.config.reward.beta)
