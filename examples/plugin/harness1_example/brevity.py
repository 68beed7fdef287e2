"""A reward term for small sets."""

from __future__ import annotations

from harness1.reward import Case, component


@component("brevity")
def brevity(case: Case) -> float:
    """Return 1 for an empty curated set, 0 for a full one. The weight is `reward.weights.brevity`."""
    return 1.0 - case.outcome.set_size / case.config.env.curation.cap
