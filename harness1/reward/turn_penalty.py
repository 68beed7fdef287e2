"""The penalty for long episodes."""

from __future__ import annotations

from harness1.reward.component import Case, component


@component("turn_penalty", weight=lambda settings: -settings.turn_penalty, process=True)
def turn_penalty(case: Case) -> float:
    """min((n - n0) / max(N - n0, 1), 1) for n turns above the free n0, of N allowed; 0 up to n0."""
    free = case.config.reward.turn_penalty_from
    return (case.outcome.turns - free) / max(case.config.env.max_turns - free, 1)
