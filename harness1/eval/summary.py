"""The summary of a run: means over tasks with confidence intervals, an account of every task and failure, and the
resources it used, which unlike metrics depend on the machine and on prices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from harness1.config import Config, Machine
from harness1.errors import UsageError
from harness1.eval.metrics import Faults, Tokens, broken, measure, metric_names, model_use, tokens_of
from harness1.eval.statistics import bootstrap_mean, bootstrap_means, finite_or_null, task_means, variance_components
from harness1.records import STATUS_OF, Episode, Gold, Hashes, Record, Status, StopReason, Task
from harness1.reward import composite
from harness1.reward.measures import Outcome, measure_outcome
from harness1.rows.calls import calls_of

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""The values of the samples, by metric and by scored task that has it."""


def summarise(
    episodes: Iterable[Episode],
    tasks: Mapping[str, Task],
    config: Config,
    seed: int = 0,
    *,
    finished: bool = False,
    faults: Faults = "exclude",
) -> dict[str, Any]:
    """Return the content of `metrics.json` as plain data. Each metric is at top level as `{mean, low, high}`: samples
    of a task are averaged, then tasks (null if no task was scored). `spread` has, for each metric with several samples
    of a task, the standard deviation between tasks and between the samples of one task
    (`statistics.variance_components`). A policy's failure is scored like any episode, with nothing delivered; an
    infrastructure fault is left out of the metrics, or counts as 0 (`faults`). `failures` counts episodes by status,
    and `broken` says of those that broke why, and how they count (`metrics.broken`). Rewards are computed with
    `config`, whatever the episodes recorded. `tool_mix` is the share of each tool in all successful calls. The means
    are over the `scored` ones of the `tasks`; the `missing` ones have no episode at all, and the others have only
    infrastructure faults. `finished`: no more episodes will come. A task without one was dropped and is scored as an
    episode in which nothing was done, found or delivered: no run gains by leaving a hard task out. `faults`: how an
    episode broken by the infrastructure counts: `exclude`, or `zero`, like a dropped task. Raises UsageError: an
    episode belongs to none of the tasks, or a task cannot be scored."""
    run = _read(episodes, tasks, config, finished, faults)
    samples = run.by_metric(config)
    statuses = {status: run.statuses[status] for status in Status if status is not Status.COMPLETED}
    calls = run.calls.total()
    return _intervals(samples, len(run.samples), config, seed) | {
        "spread": _spreads(samples),
        "tasks": len(tasks),
        "scored": len(run.samples),
        "missing": len(tasks.keys() - run.met),
        "episodes": run.statuses.total(),
        "failures": {status.value: count for status, count in statuses.items()},
        "faults": faults,
        "broken": broken(run.stop_reasons, run.faults, faults),
        "stop_reasons": {reason.value: run.stop_reasons[reason] for reason in StopReason},
        "tool_mix": {name: count / calls for name, count in sorted(run.calls.items())},
    }


def task_metrics(
    episodes: Iterable[Episode],
    tasks: Mapping[str, Task],
    config: Config,
    *,
    finished: bool = False,
    faults: Faults = "exclude",
) -> dict[str, dict[str, float]]:
    """Return, for every scored task in order of its id, the mean of each metric over its samples. Runs are paired task
    by task with these means. `finished`, `faults`: whether tasks without an episode count, and how broken episodes do
    (see `summarise`). Raises UsageError: an episode belongs to none of the tasks, or a task cannot be scored."""
    run = _read(episodes, tasks, config, finished, faults)
    samples = run.by_metric(config)
    return {
        task_id: {name: _mean(of[task_id]) for name, of in samples.items() if task_id in of}
        for task_id in sorted(run.samples)
    }


def cut(episode: Episode, size: int) -> Episode:
    """Return the episode as if only the first `size` units of its ranked curated set had been delivered, for
    comparisons at equal size. Its reward is dropped, because it was for the whole set. Raises UsageError: the size is
    negative."""
    if size < 0:
        raise UsageError(f"a curated set cannot be cut to {size} units")
    kept = tuple(sorted(episode.curated, key=lambda entry: entry.rank)[:size])
    hashes = msgspec.structs.replace(episode.hashes, reward="")
    return msgspec.structs.replace(episode, curated=kept, reward=None, hashes=hashes)


@dataclass(frozen=True)
class _Run:
    met: set[str] = field(default_factory=set)
    samples: defaultdict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    statuses: Counter[Status] = field(default_factory=Counter)
    stop_reasons: Counter[StopReason] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """Episodes that the infrastructure broke, by its message."""
    calls: Counter[str] = field(default_factory=Counter)

    def by_metric(self, config: Config) -> Samples:
        """Return the samples of each metric. A tool that an episode did not use counts as 0 calls; any other metric has
        only the samples that define it."""
        scored = sorted(self.samples.items())
        names = [*metric_names(config.env), *(f"tool_{name}" for name in sorted(self.calls))]
        found = {name: {task_id: [row.get(name, 0.0) for row in rows] for task_id, rows in scored} for name in names}
        for name in sorted({name for _, rows in scored for row in rows for name in row} - found.keys()):
            having = {task_id: [row[name] for row in rows if name in row] for task_id, rows in scored}
            found[name] = {task_id: values for task_id, values in having.items() if values}
        return found


def _read(
    episodes: Iterable[Episode], tasks: Mapping[str, Task], config: Config, finished: bool, faults: Faults
) -> _Run:
    run = _Run()
    for episode in episodes:
        task_id = episode.task.task_id
        if task_id not in tasks:
            raise UsageError(f"episode {episode.episode_id!r} is of task {task_id!r}, which is not among the tasks")
        run.met.add(task_id)
        run.statuses[episode.status] += 1
        run.stop_reasons[episode.stop_reason] += 1
        if episode.status is Status.INFRA_ERROR:
            run.faults[episode.error or "no reason was recorded"] += 1
            if faults == "zero":
                run.samples[task_id].append(metrics_of_nothing(tasks[task_id], config))
            continue
        result = measure_outcome(episode, tasks[task_id].gold)
        run.samples[task_id].append(measure_episode(result, episode, tasks[task_id].gold, config))
        run.calls.update(result.calls)
    for task_id in tasks.keys() - run.met if finished else ():
        run.samples[task_id].append(metrics_of_nothing(tasks[task_id], config))
    return run


def measure_episode(result: Outcome, episode: Episode, gold: Gold | None, config: Config) -> dict[str, float]:
    """Return every metric of an episode that was scored with a configuration, whatever reward it recorded."""
    scored = msgspec.structs.replace(episode, reward=composite(result, episode, config, gold))
    return measure(result, scored, config.env, gold) | model_use(episode)


def metrics_of_nothing(task: Task, config: Config) -> dict[str, float]:
    """Return the metrics of an episode in which nothing was done, found or delivered: of a dropped task, or of a fault
    that counts as 0."""
    stop = StopReason.CONTEXT_LIMIT
    nothing = Episode(
        episode_id="",
        task=task.public(),
        stop_reason=stop,
        status=STATUS_OF[stop],
        hashes=Hashes("", "", ""),
        unit=config.index.unit,
    )
    return measure_episode(measure_outcome(nothing, task.gold), nothing, task.gold, config)


def _intervals(samples: Samples, scored: int, config: Config, seed: int) -> dict[str, Any]:
    """Return intervals: for a metric that some tasks lack, over the other tasks; for all others, from the same
    resamples."""
    means = {name: [_mean(values) for values in of.values()] for name, of in samples.items()}
    everywhere = [name for name, column in means.items() if len(column) == scored]
    table = np.array([means[name] for name in everywhere]).reshape(len(everywhere), scored).T
    found = dict(zip(everywhere, bootstrap_means(table, config.machine.bootstrap, seed), strict=True))
    for name in means.keys() - found.keys():
        found[name] = bootstrap_mean(means[name], config.machine.bootstrap, seed)
    return {name: finite_or_null(found[name]) for name in means}


def _spreads(samples: Samples) -> dict[str, Any]:
    repeated = {name: of for name, of in samples.items() if any(len(values) > 1 for values in of.values())}
    return {name: finite_or_null(variance_components(of)) for name, of in repeated.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class _Taken(Record):
    task_id: str
    whole: bool
    """True unless the infrastructure broke the episode."""
    seconds: dict[str, float]
    tokens: Tokens | None
    dollars: float | None


def resources(episodes: Iterable[Episode], config: Config, wall_seconds: float | None = None) -> dict[str, Any]:
    """Return, as plain data, sums over all episodes, those broken by the infrastructure included. `wall_seconds` is
    elapsed time, if known. `episode_seconds` are those of each stage of an episode and their `total`, which is larger,
    since episodes run side by side. `tokens` are those of `model_use.Tokens`, for policies without a model too; `exact`
    says that none was estimated, and `episodes` is the number of episodes for which they are known. `cost`, in dollars,
    is present if `machine.price` is set, over the episodes with a model. `per_episode` has the `seconds` and the `cost`
    of one episode as `{mean, low, high}`, like metrics: samples of a task are averaged, then tasks. Broken episodes and
    unknown costs are left out. Raises SchemaError: an episode lacks a segment of a prompt."""
    taken = [_count_resources(episode, config.machine.price) for episode in episodes]
    known = [each.tokens for each in taken if each.tokens is not None]
    stages = sorted({stage for each in taken for stage in each.seconds})
    seconds = {stage: sum(each.seconds.get(stage, 0.0) for each in taken) for stage in stages}
    found: dict[str, Any] = {} if wall_seconds is None else {"wall_seconds": round(wall_seconds, 3)}
    found |= {
        "episodes": len(taken),
        "episode_seconds": {name: round(spent, 3) for name, spent in seconds.items()}
        | {"total": round(sum(seconds.values()), 3)},
        "tokens": {
            "prompt": sum(tokens.prompt for tokens in known),
            "prefill": sum(tokens.prefill for tokens in known),
            "output": sum(tokens.output for tokens in known),
            "exact": all(tokens.exact for tokens in known),
            "episodes": len(known),
        },
        "per_episode": _per_episode([each for each in taken if each.whole], config.machine),
    }
    if any(config.machine.price):
        found["cost"] = sum(each.dollars or 0.0 for each in taken)
    return found


def _count_resources(episode: Episode, price: tuple[float, float, float]) -> _Taken:
    tokens = tokens_of(episode)
    return _Taken(
        episode.task.task_id,
        episode.status is not Status.INFRA_ERROR,
        {stage: spent / 1000 for stage, spent in episode.stage_ms.items()},
        tokens,
        None if tokens is None else _dollars(tokens, price) if any(calls_of(episode)) else 0.0,
    )


def _per_episode(taken: Sequence[_Taken], machine: Machine) -> dict[str, dict[str, float | None]]:
    samples = {"seconds": [(each.task_id, sum(each.seconds.values())) for each in taken]}
    if any(machine.price):
        samples["cost"] = [(each.task_id, each.dollars) for each in taken if each.dollars is not None]
    means = {name: list(task_means(pairs).values()) for name, pairs in samples.items()}
    return {name: finite_or_null(bootstrap_mean(values, machine.bootstrap)) for name, values in means.items()}


def _dollars(tokens: Tokens, price: tuple[float, float, float]) -> float:
    prompt, cached, output = price
    return (tokens.prefill * prompt + (tokens.prompt - tokens.prefill) * cached + tokens.output * output) / 1e6
