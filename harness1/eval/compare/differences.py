"""Paired differences of two runs in their metrics, with intervals and significance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from harness1.eval.statistics import Interval, holm, paired_difference, randomisation_test
from harness1.records import Record

PerTask = Mapping[str, Mapping[str, float]]
"""The mean of every metric over the samples of each scored task."""


class Difference(Record):
    """A metric over the common tasks: the means of both runs, and the mean of the second minus the first."""

    first: float
    second: float
    difference: Interval
    p: float
    """Two-sided p-value of a paired randomisation test."""
    tasks: int
    """Tasks for which both runs define it."""
    p_holm: float | None = None
    """If several runs are compared with the first: p corrected for their number (Holm 1979)."""


def differences_of(first: PerTask, second: PerTask, names: Iterable[str], resamples: int) -> dict[str, Difference]:
    """Return the difference in each named metric that some task has in both runs.

    Raises:
        UsageError: `resamples` is below 1.
    """
    found: dict[str, Difference] = {}
    for name in names:
        both = sorted(task for task in first if name in first[task] and name in second.get(task, ()))
        if both:
            a, b = ({task: run[task][name] for task in both} for run in (first, second))
            found[name] = Difference(
                first=math.fsum(a.values()) / len(both),
                second=math.fsum(b.values()) / len(both),
                difference=paired_difference(b, a, resamples),
                p=randomisation_test(b, a, resamples),
                tasks=len(both),
            )
    return found


def corrected(family: Sequence[Mapping[str, Difference]]) -> list[dict[str, Difference]]:
    """Correct the p-values of several runs compared with the same run, which are one family for each metric; those of
    a single run stay as they are."""
    metrics = [dict(each) for each in family]
    if len(metrics) < 2:
        return metrics
    for name in {name for found in metrics for name in found}:
        values = {number: found[name].p for number, found in enumerate(metrics) if name in found}
        for number, p in holm(values).items():
            metrics[number][name] = msgspec.structs.replace(metrics[number][name], p_holm=p)
    return metrics
