"""Credit for curating along the way rather than at the end."""

from __future__ import annotations

from harness1.reward.component import Case, component


@component("curation", weight=lambda settings: settings.curation, process=True)
def curation(case: Case) -> float:
    """min(share of turns that curated / target share, 1); 1 where the target is 0."""
    turns, target = case.outcome.turns, case.config.reward.curation_target
    if target == 0.0:
        return 1.0
    return case.outcome.curate_calls / turns / target if turns else 0.0
