"""Confidence intervals by the percentile bootstrap over tasks (Efron 1979), and paired randomisation tests. The unit is
the task: samples of one task are not independent and are averaged first (`task_means`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness1.errors import UsageError
from harness1.records import Record

Name = TypeVar("Name")


LEVEL, RESAMPLES = 0.95, 2000
_CELLS = 1 << 20  # draws held in memory at once, whatever the number of tasks and resamples


class Interval(Record):
    """A mean over tasks with its bootstrap confidence interval: three equal numbers of one task, three NaN of none."""

    mean: float
    low: float
    high: float


def finite_or_null(record: Record) -> dict[str, float | None]:
    """Return a record's numbers by name for JSON, which has no NaN: undefined ones are None."""
    return {name: None if math.isnan(value) else value for name, value in msgspec.structs.asdict(record).items()}


def bootstrap_mean(values: Sequence[float] | NDArray[np.float64], resamples: int, seed: int = 0) -> Interval:
    """Return the mean of one value per task. Equal values in equal order and an equal seed give an equal interval."""
    return bootstrap_means(np.asarray(values, dtype=np.float64).reshape(-1, 1), resamples, seed)[0]


def bootstrap_means(values: ArrayLike, resamples: int, seed: int = 0) -> list[Interval]:
    """Return the means of the columns of `values` (tasks, columns), all from the same resamples of the tasks."""
    if resamples < 1:
        raise UsageError(f"a bootstrap needs at least one resample, not {resamples}")
    table = np.asarray(values, dtype=np.float64)
    if len(table) == 0:
        return [Interval(np.nan, np.nan, np.nan)] * table.shape[1]
    # Relative to the first task a constant column stays exact: its interval has no width.
    origin, tasks = table[0], len(table)
    shifted = table - origin
    rng, means = np.random.default_rng(seed), []
    block = max(1, _CELLS // tasks)
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        draws = rng.integers(tasks, size=(size, tasks)) + tasks * np.arange(size)[:, None]
        # How often each resample draws each task, times the values: one matrix product for all columns.
        counts = np.bincount(draws.ravel(), minlength=size * tasks).reshape(size, tasks)
        means.append(counts.astype(np.float64) @ shifted / tasks)
    drawn = np.concatenate(means)
    bounds = [shifted.mean(axis=0), *np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)]
    return [Interval(*map(float, row)) for row in np.stack(bounds, axis=1) + origin[:, None]]


def paired_difference(a: Mapping[str, float], b: Mapping[str, float], resamples: int, seed: int = 0) -> Interval:
    """Return the mean of `a[task] - b[task]`, in which the variance between tasks cancels."""
    return bootstrap_mean(_differences(a, b), resamples, seed)


def randomisation_test(a: Mapping[str, float], b: Mapping[str, float], resamples: int, seed: int = 0) -> float:
    """Return the two-sided p-value of a difference (Fisher's randomisation test; Smucker, Allan and Carterette 2007):
    how often the mean of `a[task] - b[task]` is at least as far from 0 under random signs; over all signs if there are
    at most `resamples`, else (count + 1) / (resamples + 1). Raises UsageError: the runs are not of the same tasks."""
    if resamples < 1:
        raise UsageError(f"a randomisation test needs at least one resample, not {resamples}")
    differences = _differences(a, b)
    differences = differences[differences != 0.0]  # zeros have no sign
    # Sums of the same numbers in another order differ by rounding.
    least = abs(differences.sum()) - 1e-12 * np.abs(differences).sum()
    every = 2 ** len(differences)
    exact = every <= resamples
    rng = np.random.default_rng(seed)
    block = max(1, _CELLS // max(1, len(differences)))
    extreme = 0
    for start in range(0, every if exact else resamples, block):
        size = min(block, (every if exact else resamples) - start)
        # All signs are the binary digits of the row numbers.
        rows = np.arange(start, start + size)[:, None]
        signs = rows >> np.arange(len(differences)) & 1 if exact else rng.integers(2, size=(size, len(differences)))
        extreme += int((np.abs((2 * signs - 1) @ differences) >= least).sum())
    return extreme / every if exact else (extreme + 1) / (resamples + 1)


def holm(p: Mapping[Name, float]) -> dict[Name, float]:
    """Adjust p-values of several comparisons to keep the chance of any false finding below the level (Holm 1979): in
    ascending order, multiply each by the number that remain, itself included; never falling, at most 1."""
    adjusted: dict[Name, float] = {}
    floor = 0.0
    for passed, name in enumerate(sorted(p, key=lambda name: p[name])):
        adjusted[name] = floor = max(floor, min(1.0, (len(p) - passed) * p[name]))
    return {name: adjusted[name] for name in p}


def task_means(samples: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean over the samples of each task, from pairs of task id and value."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for task_id, value in samples:
        groups[task_id].append(value)
    return {task_id: sum(group) / len(group) for task_id, group in groups.items()}


def _differences(a: Mapping[str, float], b: Mapping[str, float]) -> NDArray[np.float64]:
    if unpaired := sorted(a.keys() ^ b.keys()):
        shown = ", ".join(unpaired[:5]) + (", ..." if len(unpaired) > 5 else "")
        raise UsageError(f"a paired comparison needs the same tasks on both sides; {len(unpaired)} differ: {shown}")
    return np.array([a[task] - b[task] for task in sorted(a)], dtype=np.float64)


def probability(p: float) -> str:
    """Format a p-value, never as 0."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
