"""The summary of a run: means over tasks with confidence intervals, and an account of every task and failure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from harness1.config import Config
from harness1.errors import UsageError
from harness1.eval.metrics import measure, metric_names
from harness1.eval.model_use import model_use
from harness1.eval.outcome import outcome
from harness1.eval.statistics import Interval, bootstrap_means
from harness1.records import Episode, Status, StopReason, Task
from harness1.reward.composite import composite


def summarise(episodes: Iterable[Episode], tasks: Mapping[str, Task], config: Config, seed: int = 0) -> dict[str, Any]:
    """The content of `metrics.json`, plain data.

    Each metric stands at top level as `{mean, low, high}`: samples of a task are averaged, then tasks (null where no
    task was scored). A policy's failure is scored like any episode, with nothing delivered; an infrastructure fault
    is left out of the metrics and counted in `failures`. Rewards are those of `config`, whatever the episodes carry.
    `tasks` = `scored` + `missing` (no episode) + those whose episodes are all infrastructure faults. `tool_mix` is
    the share of each tool in all successful calls.

    Raises:
        UsageError: an episode belongs to none of the tasks, or a task cannot be scored.
    """
    run = _read(episodes, tasks, config)
    per_task = run.per_task(config)
    statuses = {status: run.statuses[status] for status in Status if status is not Status.COMPLETED}
    calls = run.calls.total()
    return _intervals(per_task, config, seed) | {
        "tasks": len(tasks),
        "scored": len(per_task),
        "missing": len(tasks.keys() - run.met),
        "episodes": run.statuses.total(),
        "failures": {status.value: count for status, count in statuses.items()},
        "stop_reasons": {reason.value: run.stop_reasons[reason] for reason in StopReason},
        "tool_mix": {name: count / calls for name, count in sorted(run.calls.items())},
    }


def task_metrics(episodes: Iterable[Episode], tasks: Mapping[str, Task], config: Config) -> dict[str, dict[str, float]]:
    """For every scored task, in order of its id, the mean of each metric over its samples: what runs are paired by.

    Raises:
        UsageError: an episode belongs to none of the tasks, or a task cannot be scored.
    """
    return _read(episodes, tasks, config).per_task(config)


def cut(episode: Episode, size: int) -> Episode:
    """The episode as if only the first `size` of its ranked curated set had been delivered, for comparisons at equal
    size. Its reward is dropped, because it was for the whole set.

    Raises:
        UsageError: the size is negative.
    """
    if size < 0:
        raise UsageError(f"a curated set cannot be cut to {size} units")
    kept = tuple(sorted(episode.curated, key=lambda entry: entry.rank)[:size])
    hashes = msgspec.structs.replace(episode.hashes, reward="")
    return msgspec.structs.replace(episode, curated=kept, reward=None, hashes=hashes)


@dataclass(frozen=True)
class _Run:
    """What one pass over the episodes gathers."""

    met: set[str] = field(default_factory=set)
    samples: defaultdict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    statuses: Counter[Status] = field(default_factory=Counter)
    stop_reasons: Counter[StopReason] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def per_task(self, config: Config) -> dict[str, dict[str, float]]:
        """Means over samples; a tool that an episode did not use counts as 0 calls of it. What is not defined for
        every episode is averaged over those for which it is."""
        names = [*metric_names(config.env), *(f"tool_{name}" for name in sorted(self.calls))]
        means = {}
        for task_id, rows in sorted(self.samples.items()):
            means[task_id] = {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}
            for name in sorted({name for row in rows for name in row} - set(names)):
                defined = [row[name] for row in rows if name in row]
                means[task_id][name] = sum(defined) / len(defined)
        return means


def _read(episodes: Iterable[Episode], tasks: Mapping[str, Task], config: Config) -> _Run:
    run = _Run()
    for episode in episodes:
        task_id = episode.task.task_id
        if task_id not in tasks:
            raise UsageError(f"episode {episode.episode_id!r} is of task {task_id!r}, which is not among the tasks")
        run.met.add(task_id)
        run.statuses[episode.status] += 1
        run.stop_reasons[episode.stop_reason] += 1
        if episode.status is Status.INFRA_ERROR:
            continue
        result = outcome(episode, tasks[task_id].gold)
        scored = msgspec.structs.replace(episode, reward=composite(result, episode, config))
        measured = measure(result, scored, config.env, tasks[task_id].gold)
        run.samples[task_id].append(measured | model_use(episode))
        run.calls.update(result.calls)
    return run


def _intervals(per_task: dict[str, dict[str, float]], config: Config, seed: int) -> dict[str, Any]:
    """Of a metric that not every task has, over those that have it."""
    rows = list(per_task.values())
    names = list(dict.fromkeys(name for row in rows for name in row)) or list(metric_names(config.env))
    everywhere = [name for name in names if all(name in row for row in rows)]
    table = np.array([[row[name] for name in everywhere] for row in rows]).reshape(len(rows), len(everywhere))
    found = dict(zip(everywhere, bootstrap_means(table, config.run.bootstrap, seed), strict=True))
    for name in (name for name in names if name not in found):
        column = np.array([[row[name]] for row in rows if name in row])
        (found[name],) = bootstrap_means(column, config.run.bootstrap, seed)
    return {name: _plain(interval) for name, interval in found.items()}


def _plain(interval: Interval) -> dict[str, float | None]:
    """JSON knows no NaN: an undefined mean is null."""
    return {name: None if math.isnan(value) else value for name, value in msgspec.structs.asdict(interval).items()}
