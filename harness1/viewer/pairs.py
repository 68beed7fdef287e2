"""Runs compared task by task, as `harness1 compare` does it, from the episodes that a viewer file was made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from harness1.eval.compare.differences import Difference, PerTask, corrected, differences_of
from harness1.eval.metrics import HEADLINE
from harness1.eval.summary import task_metrics
from harness1.records import EpisodeKey, Task
from harness1.viewer.run_source import RunSource

MOST_RUNS = 5
"""With more runs than this, only pairs with the first are compared."""

Measured = Mapping[EpisodeKey, Mapping[str, float]]
"""The metrics of every episode; none of one that cannot be scored."""


def pairs(runs: Sequence[RunSource], measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return every comparison of a run with a later one on the same tasks as JSON data: their places, the number of
    their common scored tasks, and for each metric both means, the mean difference with its interval, and p."""
    found: list[dict[str, Any]] = []
    values = [per_task(run, each) for run, each in zip(runs, measured, strict=True)]
    for first in range(len(runs) if len(runs) <= MOST_RUNS else 1):
        family = list(_with_later(runs, values, first))
        metrics = corrected([differences for _, _, differences in family])
        found += [
            {"first": first, "second": second, "tasks": tasks, "metrics": _rows(each)}
            for (second, tasks, _), each in zip(family, metrics, strict=True)
        ]
    return found


def per_task(run: RunSource, measured: Measured) -> PerTask:
    """Return the mean of each metric over the samples of each scored task; tasks that a finished run dropped count as
    nothing done, as in its summary."""
    made_with = tuple(run.stage.inputs.get(name) for name in ("env", "policy", "index"))
    of_run = sorted(key for key in measured if key[2:] == made_with)
    groups = groupby((key for key in of_run if measured[key]), lambda key: key.task_id)
    found = {task_id: _means([measured[key] for key in samples]) for task_id, samples in groups}
    if run.is_finished and "tasks" in run.stage.inputs:
        met = {key.task_id for key in of_run}
        golds = {task_id: gold for (task_id, _), gold in run.golds.items() if task_id not in met}
        tasks = {task_id: Task(task_id, "", gold=gold) for task_id, gold in golds.items()}
        found |= task_metrics((), tasks, run.config, finished=True)
    return run.with_rollout_costs(found)


def _with_later(
    runs: Sequence[RunSource], values: Sequence[PerTask], first: int
) -> Iterator[tuple[int, int, dict[str, Difference]]]:
    for second in range(first + 1, len(runs)):
        common = values[first].keys() & values[second].keys()
        if common and _tasks_of(runs[first]) == _tasks_of(runs[second]):
            resamples = runs[first].config.machine.bootstrap
            yield second, len(common), differences_of(values[first], values[second], HEADLINE, resamples)


def _tasks_of(run: RunSource) -> tuple[str, Any]:
    """Return the name of a run's dataset, wherever it lies, and its split."""
    return Path(run.dataset).name, run.stage.inputs.get("split")


def _means(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: fmean(sample[name] for sample in samples if name in sample) for name in names}


def _rows(metrics: Mapping[str, Difference]) -> dict[str, list[float]]:
    return {
        name: [
            row.first,
            row.second,
            row.difference.mean,
            row.difference.low,
            row.difference.high,
            row.p if row.p_holm is None else row.p_holm,
        ]
        for name, row in metrics.items()
    }
