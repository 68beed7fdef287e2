"""The named metrics of a scored episode, the tokens and calls that it cost its model, and why it fell short; and their
summary for a run: means over tasks with intervals, an account of every failure, and the resources it used."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from harness1.config import Config, Env
from harness1.errors import UsageError
from harness1.eval.statistics import RESAMPLES, bootstrap_mean, bootstrap_means, finite_or_null, task_means
from harness1.records import (
    STATUS_OF,
    ChunkId,
    DocId,
    Episode,
    Faults,
    Gold,
    Hashes,
    Record,
    Status,
    StopReason,
    Task,
    UnitId,
)
from harness1.retrieval.corpus import approximate_tokens
from harness1.reward import composite
from harness1.reward.measures import MEASURES, Outcome, measure_outcome, targets
from harness1.rows import prefix_merging
from harness1.rows.calls import calls_for_rows, calls_of, prompt_ids


def rerank_recall(episode: Episode, gold: Gold | None) -> float | None:
    """Return the share of the gold in an episode's reranker inputs that its outputs keep; None without any."""
    reranked = [each for observation in episode.observations for each in observation.rankings if each.pre_rerank_ids]
    given = _units((name for ranking in reranked for name in ranking.pre_rerank_ids), episode)
    kept = _units((name for ranking in reranked for name in ranking.chunk_ids), episode)
    wanted = targets(episode.task.task_id, gold, episode.unit).relevant
    found = [target for target in wanted if not target.isdisjoint(given)]
    return sum(not target.isdisjoint(kept) for target in found) / len(found) if found else None


def documents_of_hits(episode: Episode) -> dict[ChunkId, DocId]:
    """Return the document of every chunk that an episode was shown."""
    return {hit.chunk_id: hit.doc_id for observation in episode.observations for hit in observation.hits}


def _units(chunk_ids: Iterable[ChunkId], episode: Episode) -> set[UnitId]:
    # The record has no document for a chunk that was never shown: such a chunk counts for the documents with its own id
    # and with its id up to the last `#` (see `chunking.chunk`).
    if episode.unit == "chunk":
        return {UnitId(name) for name in chunk_ids}
    shown = documents_of_hits(episode)
    names = ((shown[name],) if name in shown else (name, name.rpartition("#")[0]) for name in chunk_ids)
    return {UnitId(doc_id) for each in names for doc_id in each}


_CURATED = ("recall", "precision", "f1", "f2", "recall_alias", "precision_alias")
_OF_OUTCOME = {f"curated_{name}": name for name in _CURATED}
METRICS = (
    *_OF_OUTCOME,
    *("answer_recall", "answer_recall_alias", "trajectory_recall", "trajectory_answer_recall", "selection_loss"),
    *MEASURES,
    *("set_size", "turns", "reward", "duplicates_hidden", "auto_populated_kept", "tool_errors", "format_errors"),
)  # the names of all metrics in their order, without those of single tools

HEADLINE = (
    *("curated_recall", "answer_recall", "trajectory_recall", "selection_loss", "curated_precision", "curated_f1"),
    *("nDCG@10", "set_size", "turns", "prompt_tokens", "prefill_tokens", "reward"),
)  # the metrics that summarise a run and by which runs are compared; model runs and older ones may lack some


def metric_names(env: Env) -> tuple[str, ...]:
    """Return the metrics that exist in an environment, without those of single tools."""
    of_mechanisms = {"duplicates_hidden": env.has("dedup"), "auto_populated_kept": env.has("auto_populate")}
    return tuple(name for name in METRICS if of_mechanisms.get(name, True))


def measure(outcome: Outcome, episode: Episode, env: Env, gold: Gold | None = None) -> dict[str, float]:
    """Return all metrics of a scored episode, `tool_<name>` and `rerank_recall` among them; UsageError if it is not."""
    if episode.reward is None:
        raise UsageError(f"episode {episode.episode_id!r} has no reward: score it first")
    populated = {unit for observation in episode.observations for unit in observation.delta.auto_populated}
    of_episode = {
        "reward": episode.reward.total,
        "duplicates_hidden": float(len(episode.aliases)),
        "auto_populated_kept": float(len(populated & {entry.unit_id for entry in episode.curated})),
    }
    known = outcome.ranked | of_episode
    named = {
        name: known[name] if name in known else float(getattr(outcome, _OF_OUTCOME.get(name, name)))
        for name in metric_names(env)
    }
    if gold is not None and (kept := rerank_recall(episode, gold)) is not None:
        named["rerank_recall"] = kept
    return named | {f"tool_{name}": float(count) for name, count in outcome.calls.items()}


class Tokens(Record):
    """Token counts over all calls of an episode. `prefill`: what no cache holds. `exact`: no count is an estimate."""

    prompt: int
    prefill: int
    output: int
    exact: bool


def tokens_of(episode: Episode) -> Tokens | None:
    """Return the tokens of an episode; for a policy without a model, those that its contexts would have cost, if known.
    A hosted model returns no ids: each attempt of a turn is assumed to get the turn's context, of which the server
    caches that of the previous attempt, and to be as long as the last one, estimated by its characters."""
    calls = list(calls_of(episode))
    if calls and all(call.output_ids for call in calls):
        prompts = [prompt_ids(episode, call) for call in calls]
        held = [(), *(prompt + call.output_ids for prompt, call in zip(prompts, calls, strict=True))]
        prompt = sum(map(len, prompts))
        reused = 0
        for new, old in zip(prompts, held, strict=False):
            shorter = min(len(new), len(old))
            differing = np.flatnonzero(np.asarray(new[:shorter]) != np.asarray(old[:shorter]))
            reused += int(differing[0]) if differing.size else shorter
        return Tokens(prompt, prompt - reused, sum(len(call.output_ids) for call in calls), exact=True)
    if not any(turn.prompt_tokens for turn in episode.turns):
        return None
    prompt = prefill = output = 0
    for turn in episode.turns:
        prompt += max(1, len(turn.calls)) * turn.prompt_tokens
        prefill += turn.prefill_tokens
        action = msgspec.json.encode(turn.action).decode() if turn.action is not None else ""
        output += len(turn.calls) * approximate_tokens(turn.reasoning + action)
    return Tokens(prompt, prefill, output, exact=not calls)


def model_use(episode: Episode) -> dict[str, float]:
    """Return what an episode cost its model; `merge_ratio`: trained calls per training row, if ids were recorded."""
    calls, tokens = list(calls_of(episode)), tokens_of(episode)
    used = {}
    if tokens is not None:
        used = {"prompt_tokens": float(tokens.prompt), "prefill_tokens": float(tokens.prefill)}
    if calls:
        # All attempts of a turn but the one that gave its action, if there is one, and those that no model answered.
        answered = sum(call.finish_reason != "overflow" for call in calls)
        failed = answered - sum(turn.action is not None for turn in episode.turns if turn.calls)
        used |= {"model_calls": float(len(calls)), "failed_attempts": float(failed)}
    if calls and tokens is not None and tokens.exact:
        used["output_tokens"] = float(tokens.output)
        used["merge_ratio"] = prefix_merging(calls_for_rows(episode)).merge_ratio
    return used


BROKEN = {
    StopReason.CONTEXT_OVERFLOW: "context limit",
    StopReason.FORMAT_LIMIT: "no readable action",
    StopReason.FAULT: "infrastructure",
}  # the ends of an episode that is broken. The first two are the policy's failure, and count as 0.
SHOWN_REASONS = 3


MEANINGS = {
    "fault": "the infrastructure failed",
    "format": "no action could be read",
    "context": "the context was full, or longer than the model reads",
    "unscored": "no gold to compare with",
    "complete": "all gold was delivered",
    "empty": "nothing was delivered",
    "search": "most of what is missing was never seen",
    "selection": "most of what is missing was seen and not delivered",
}  # the classes of episodes in order of precedence; the first that applies counts
_BY_STOP = dict.fromkeys((StopReason.CONTEXT_LIMIT, StopReason.CONTEXT_OVERFLOW), "context")
_BY_STOP |= {StopReason.FAULT: "fault", StopReason.FORMAT_LIMIT: "format"}


def failure_class(stop: StopReason, outcome: Outcome | None) -> str:
    """Return the class of an episode by its end and outcome, one of `MEANINGS`."""
    if stop in _BY_STOP:
        return _BY_STOP[stop]
    if outcome is None:
        return "unscored"
    if outcome.recall >= 1.0:
        return "complete"
    if outcome.set_size == 0:
        return "empty"
    unseen, unselected = 1.0 - outcome.trajectory_recall, outcome.trajectory_recall - outcome.recall
    return "search" if unseen >= unselected else "selection"


def broken(ended: Mapping[StopReason, int], said: Mapping[str, int], faults: Faults) -> dict[str, Any]:
    """Return why episodes broke, how many, how they count in means, and the most frequent messages (`said`)."""
    found: dict[str, Any] = {
        word: {"episodes": ended[stop], "counted": "zero"} for stop, word in BROKEN.items() if ended.get(stop)
    }
    if said:
        reasons = sorted(said.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_REASONS]
        found[BROKEN[StopReason.FAULT]] |= {"counted": faults, "reasons": dict(reasons)}
    return found


def broken_lines(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how many episodes of all are broken, and why with how they count."""
    for word, each in metrics.get("broken", {}).items():
        counted = "counted as 0" if each["counted"] == "zero" else "left out of the means"
        yield f"{each['episodes']:,} of {metrics['episodes']:,}", f"{word}, {counted}"


def fault_count(metrics: Mapping[str, Any]) -> int:
    """Return the number of episodes that the infrastructure broke."""
    return int(metrics["failures"]["infra_error"])


def fault_reasons(metrics: Mapping[str, Any]) -> dict[str, int]:
    """Return the most frequent messages of the infrastructure's faults, with the number of episodes of each."""
    return dict(metrics.get("broken", {}).get(BROKEN[StopReason.FAULT], {}).get("reasons", {}))


def task_metrics(
    episodes: Iterable[Episode],
    tasks: Mapping[str, Task],
    config: Config,
    *,
    finished: bool = False,
    faults: Faults = "exclude",
) -> dict[str, dict[str, float]]:
    """Return, for every scored task in order of its id, the means of its metrics; otherwise as `MeasuredRun`."""
    return MeasuredRun(episodes, tasks, config, finished=finished, faults=faults).per_task()


def cut(episode: Episode, size: int) -> Episode:
    """Return the episode as if only its first `size` units had been delivered, without its reward."""
    kept = tuple(sorted(episode.curated, key=lambda entry: entry.rank)[:size])
    hashes = msgspec.structs.replace(episode.hashes, reward="")
    return msgspec.structs.replace(episode, curated=kept, reward=None, hashes=hashes)


class MeasuredRun:
    """The metrics of every episode of a run, measured once. A policy's failure is scored like any episode; an
    infrastructure fault is left out, or counts as 0 (`faults`). If the run is `finished`, a task without an episode
    counts as one in which nothing was done or delivered. Raises UsageError: an episode is of none of the tasks, or a
    task cannot be scored."""

    def __init__(
        self,
        episodes: Iterable[Episode],
        tasks: Mapping[str, Task],
        config: Config,
        *,
        finished: bool = False,
        faults: Faults = "exclude",
    ) -> None:
        self.tasks, self.counted, self._config = tasks, faults, config
        self.met, self.samples = set[str](), defaultdict[str, list[dict[str, float]]](list)
        self.statuses, self.stop_reasons = Counter[Status](), Counter[StopReason]()
        self.faults, self.calls = Counter[str](), Counter[str]()
        for episode in episodes:
            task_id = episode.task.task_id
            if task_id not in tasks:
                raise UsageError(f"episode {episode.episode_id!r} is of task {task_id!r}, which is not among the tasks")
            self.met.add(task_id)
            self.statuses[episode.status] += 1
            self.stop_reasons[episode.stop_reason] += 1
            if episode.status is Status.INFRA_ERROR:
                self.faults[episode.error or "no reason was recorded"] += 1
                if faults == "zero":
                    self.samples[task_id].append(metrics_of_nothing(tasks[task_id], config))
                continue
            result = measure_outcome(episode, tasks[task_id].gold)
            self.samples[task_id].append(measure_episode(result, episode, tasks[task_id].gold, config))
            self.calls.update(result.calls)
        for task_id in tasks.keys() - self.met if finished else ():
            self.samples[task_id].append(metrics_of_nothing(tasks[task_id], config))

    def summary(self, seed: int = 0) -> dict[str, Any]:
        """Return the content of `metrics.json` as plain data: each metric as `{mean, low, high}` over the `scored`
        tasks, of whose samples it is averaged first (null if no task was scored); `failures` by status, and `broken`
        with why and how they count; `tool_mix`, the share of each tool in successful calls; `missing` tasks have no
        episode."""
        samples, calls = self.by_metric, self.calls.total()
        means = {name: [sum(values) / len(values) for values in of.values()] for name, of in samples.items()}
        # All intervals are from the same resamples; for a metric that some tasks lack, over the other tasks.
        everywhere = [name for name, column in means.items() if len(column) == len(self.samples)]
        table = np.array([means[name] for name in everywhere]).reshape(len(everywhere), len(self.samples)).T
        found = dict(zip(everywhere, bootstrap_means(table, RESAMPLES, seed), strict=True))
        for name in means.keys() - found.keys():
            found[name] = bootstrap_mean(means[name], RESAMPLES, seed)
        return {name: finite_or_null(found[name]) for name in means} | {
            "tasks": len(self.tasks),
            "scored": len(self.samples),
            "missing": len(self.tasks.keys() - self.met),
            "episodes": self.statuses.total(),
            "failures": {status.value: self.statuses[status] for status in Status if status is not Status.COMPLETED},
            "faults": self.counted,
            "broken": broken(self.stop_reasons, self.faults, self.counted),
            "stop_reasons": {reason.value: self.stop_reasons[reason] for reason in StopReason},
            "tool_mix": {name: count / calls for name, count in sorted(self.calls.items())},
        }

    def per_task(self) -> dict[str, dict[str, float]]:
        """Return, for every scored task in order of its id, the means of its metrics."""
        return {
            task_id: {name: sum(of[task_id]) / len(of[task_id]) for name, of in self.by_metric.items() if task_id in of}
            for task_id in sorted(self.samples)
        }

    @cached_property
    def by_metric(self) -> dict[str, dict[str, list[float]]]:
        """The samples of each task that define a metric, by metric and task."""
        # A tool that an episode did not use counts as 0 calls; any other metric has only the samples that define it.
        scored = sorted(self.samples.items())
        names = [*metric_names(self._config.env), *(f"tool_{name}" for name in sorted(self.calls))]
        found = {name: {task_id: [row.get(name, 0.0) for row in rows] for task_id, rows in scored} for name in names}
        for name in sorted({name for _, rows in scored for row in rows for name in row} - found.keys()):
            having = {task_id: [row[name] for row in rows if name in row] for task_id, rows in scored}
            found[name] = {task_id: values for task_id, values in having.items() if values}
        return found


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
            name: finite_or_null(bootstrap_mean(list(task_means(pairs).values()), RESAMPLES))
            for name, pairs in of_whole.items()
        },
    }
    return found | ({"cost": cost} if any(price) else {})
