"""The summary of a run: means over tasks with confidence intervals, an account of every task and failure, and the
resources it used, which unlike metrics depend on the machine and on prices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from harness1.config import Config
from harness1.errors import UsageError
from harness1.eval.metrics import broken, measure, metric_names, model_use, tokens_of
from harness1.eval.statistics import bootstrap_mean, bootstrap_means, finite_or_null, task_means, variance_components
from harness1.records import STATUS_OF, Episode, Faults, Gold, Hashes, Status, StopReason, Task
from harness1.reward import composite
from harness1.reward.measures import Outcome, measure_outcome
from harness1.rows.calls import calls_of


def summarise(
    episodes: Iterable[Episode],
    tasks: Mapping[str, Task],
    config: Config,
    seed: int = 0,
    *,
    finished: bool = False,
    faults: Faults = "exclude",
) -> dict[str, Any]:
    """Return the content of `metrics.json` as plain data. Each metric is at top level as `{mean, low, high}` over the
    `scored` tasks, of whose samples it is averaged first (null if no task was scored). `spread` has, for metrics with
    several samples of a task, `variance_components`. A policy's failure is scored like any episode, with nothing
    delivered; an infrastructure fault is left out of the metrics, or counts as 0 (`faults`). `failures` counts episodes
    by status, and `broken` says why and how they count. Rewards are computed with `config`, whatever the episodes
    recorded. `tool_mix` is the share of each tool in all successful calls. `missing` tasks have no episode at all; if
    the run is `finished`, they are scored as an episode in which nothing was done, found or delivered: no run gains by
    leaving a hard task out. Raises UsageError: an episode is of none of the tasks, or a task cannot be scored."""
    run = _read(episodes, tasks, config, finished, faults)
    samples, calls = run.by_metric(config), run.calls.total()
    repeated = {name: of for name, of in samples.items() if any(len(values) > 1 for values in of.values())}
    means = {name: [sum(values) / len(values) for values in of.values()] for name, of in samples.items()}
    # All intervals are from the same resamples; for a metric that some tasks lack, over the other tasks.
    everywhere = [name for name, column in means.items() if len(column) == len(run.samples)]
    table = np.array([means[name] for name in everywhere]).reshape(len(everywhere), len(run.samples)).T
    found = dict(zip(everywhere, bootstrap_means(table, config.machine.bootstrap, seed), strict=True))
    for name in means.keys() - found.keys():
        found[name] = bootstrap_mean(means[name], config.machine.bootstrap, seed)
    return {name: finite_or_null(found[name]) for name in means} | {
        "spread": {name: variance_components(of) for name, of in repeated.items()},
        "tasks": len(tasks),
        "scored": len(run.samples),
        "missing": len(tasks.keys() - run.met),
        "episodes": run.statuses.total(),
        "failures": {status.value: run.statuses[status] for status in Status if status is not Status.COMPLETED},
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
    """Return, for every scored task in order of its id, the mean of each metric over its samples; otherwise as
    `summarise`."""
    run = _read(episodes, tasks, config, finished, faults)
    samples = run.by_metric(config)
    return {
        task_id: {name: sum(of[task_id]) / len(of[task_id]) for name, of in samples.items() if task_id in of}
        for task_id in sorted(run.samples)
    }


def cut(episode: Episode, size: int) -> Episode:
    """Return the episode as if only the first `size` units of its ranked curated set had been delivered, without its
    reward, which was for the whole set."""
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
    calls: Counter[str] = field(default_factory=Counter)

    def by_metric(self, config: Config) -> dict[str, dict[str, list[float]]]:
        # A tool that an episode did not use counts as 0 calls; any other metric has only the samples that define it.
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
    """Return the metrics of an episode in which nothing was done, found or delivered."""
    stop, by, unit = StopReason.CONTEXT_LIMIT, Hashes("", "", ""), config.index.unit
    nothing = Episode(episode_id="", task=task.public(), stop_reason=stop, status=STATUS_OF[stop], hashes=by, unit=unit)
    return measure_episode(measure_outcome(nothing, task.gold), nothing, task.gold, config)


def resources(episodes: Iterable[Episode], config: Config, wall_seconds: float | None = None) -> dict[str, Any]:
    """Return, as plain data, sums over all episodes, broken ones included. `wall_seconds` is elapsed time, if known.
    `episode_seconds` are those of each stage and their `total`, which is larger, since episodes run side by side.
    `tokens` are `metrics.Tokens`; `exact` says that none was estimated, `episodes` for how many they are known. `cost`,
    in dollars, is present if `machine.price` is set. `per_episode` has the `seconds` and the `cost` of one episode as
    `{mean, low, high}`, samples of a task averaged first, without broken episodes and unknown costs."""
    price = config.machine.price
    stages: defaultdict[str, list[float]] = defaultdict(list)
    of_whole: dict[str, list[tuple[str, float]]] = {"seconds": []}
    of_whole |= {"cost": []} if any(price) else {}
    tokens: dict[str, Any] = {"prompt": 0, "prefill": 0, "output": 0, "exact": True, "episodes": 0}
    count, cost = 0, 0.0
    for episode in episodes:
        count += 1
        spent = {stage: took / 1000 for stage, took in episode.stage_ms.items()}
        for stage, seconds in spent.items():
            stages[stage].append(seconds)
        dollars, used = None, tokens_of(episode)
        if used is not None:
            for name in ("prompt", "prefill", "output"):
                tokens[name] += getattr(used, name)
            tokens |= {"exact": tokens["exact"] and used.exact, "episodes": tokens["episodes"] + 1}
            of_each = zip(price, (used.prefill, used.prompt - used.prefill, used.output), strict=True)
            dollars = sum(cost_of_one * number for cost_of_one, number in of_each) / 1e6
            dollars *= any(calls_of(episode))  # without a model it costs nothing
            cost += dollars
        if episode.status is not Status.INFRA_ERROR:
            of_whole["seconds"].append((episode.task.task_id, sum(spent.values())))
            if dollars is not None and "cost" in of_whole:
                of_whole["cost"].append((episode.task.task_id, dollars))
    seconds_of = {stage: sum(stages[stage]) for stage in sorted(stages)}
    seconds_of["total"] = sum(seconds_of.values())
    found: dict[str, Any] = {} if wall_seconds is None else {"wall_seconds": round(wall_seconds, 3)}
    found |= {
        "episodes": count,
        "episode_seconds": {name: round(spent, 3) for name, spent in seconds_of.items()},
        "tokens": tokens,
        "per_episode": {
            name: finite_or_null(bootstrap_mean(list(task_means(pairs).values()), config.machine.bootstrap))
            for name, pairs in of_whole.items()
        },
    }
    return found | ({"cost": cost} if any(price) else {})
