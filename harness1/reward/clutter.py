"""The price of what was delivered and is not relevant."""

from __future__ import annotations

from harness1.reward.component import Case, component


@component("clutter", weight=lambda settings: -settings.clutter)
def clutter(case: Case) -> float:
    """Irrelevant delivered units, as a share of the most that can be delivered. Unlike precision it tells a set of five
    wrong units from one of thirty (a linear utility, as in the filtering track of TREC 2002)."""
    irrelevant = case.outcome.set_size * (1.0 - case.outcome.precision)
    return irrelevant / case.config.env.curation.cap
