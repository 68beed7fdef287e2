"""Fusion of several rollouts of each task into one ranked set by reciprocal rank fusion (`retrieval.ordering.rrf`),
stored as an ordinary run folder with the total cost of the rollouts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation, write_metrics
from harness1.eval.outputs import task_table
from harness1.eval.resources import resources
from harness1.eval.run_view import RunView, fused_metrics, refuse_other_dataset
from harness1.eval.scored_with import task_hashes
from harness1.eval.statistics import bootstrap_mean
from harness1.eval.summary import task_metrics
from harness1.hashing import digest, file_digest
from harness1.records import STATUS_OF, TAGS, ChunkId, Curated, Episode, Hashes, Status, StopReason, Tag, Task, UnitId
from harness1.retrieval.protocol import rrf
from harness1.reward import score
from harness1.runs import provenance
from harness1.runs.files import read_json, write_atomically, write_json
from harness1.runs.folder import METRICS, REPORT, RESOURCES, TASKS, VIEW, clear_run, refuse_other_run, run_stage
from harness1.runs.stage import Stage, under_way
from harness1.runs.store import EPISODES, EpisodeStore

CAP = 30
"""Most units of a curated set."""

SUMMED = (
    "turns",
    "tool_errors",
    "format_errors",
    "model_calls",
    "failed_attempts",
    "prompt_tokens",
    "prefill_tokens",
    "output_tokens",
)
"""Metrics of a rollout's cost, which add up; so do those of single tools."""
TOOL = "tool_"


@dataclass(frozen=True)
class Fusion:
    """A run whose episodes are each made of several rollouts of their task, named by `stage`. The episodes have no
    turns of their own; the total cost of their rollouts is in the stage's outputs, under `taken`."""

    stage: Stage
    episodes: tuple[Episode, ...]
    left_out: int
    """Rollouts broken by the infrastructure, which are left out."""


def fuse(runs: Sequence[RunView], k: int = 60, cap: int = CAP) -> Fusion:
    """Fuse all rollouts of each task, over the samples of every run.

    A unit is ranked by its sum of `1 / (k + rank)` over the delivered sets that contain it, ties by id, and has the
    most important of its tags. The fused episode has seen everything that one of its rollouts saw. A rollout that ended
    in a policy error delivered nothing.

    Raises:
        UsageError: there is only one rollout, the runs are not of the same tasks, index and unit, one of them is itself
            fused, or `k` or `cap` is out of range.
    """
    if k < 1 or not 1 <= cap <= CAP:
        raise UsageError(f"fusion needs a k of at least 1, not {k}, and a cap of 1 to {CAP}, not {cap}")
    _refuse_unlike(runs)
    stage = _stage(runs, k, cap)
    rollouts = _rollouts(runs)
    first = runs[0]
    fused = [_fused(first.tasks[task_id], group, stage, k, cap) for task_id, group in rollouts.items()]
    scored = tuple(score(episode, first.tasks[episode.task.task_id].gold, first.config) for episode in fused)
    broken = sum(episode.status is Status.INFRA_ERROR for group in rollouts.values() for episode in group)
    return Fusion(stage, scored, broken)


def _refuse_unlike(runs: Sequence[RunView]) -> None:
    if sum(run.stage.inputs["samples"] for run in runs) < 2:
        raise UsageError("there is nothing to fuse: give several runs, or one with several samples (--samples)")
    places = [run.folder.resolve() for run in runs]
    if len(set(places)) < len(places):
        raise UsageError("a run is named twice: its rollouts would count twice")
    first = runs[0]
    for run in runs:
        if "fused" in run.stage.inputs:
            raise UsageError(f"{run.folder} is itself fused: name the runs that it was made from")
        refuse_other_dataset(first, run)
        if run.tasks.keys() != first.tasks.keys():
            raise UsageError(f"{first.folder} and {run.folder} are not runs of the same tasks: they cannot be fused")
        if run.config.index.unit != first.config.index.unit:
            raise UsageError(f"{first.folder} and {run.folder} are scored in different units: they cannot be fused")
        if run.stage.inputs["index"] != first.stage.inputs["index"]:
            raise UsageError(f"{first.folder} and {run.folder} searched different indexes: they cannot be fused")


def _stage(runs: Sequence[RunView], k: int, cap: int) -> Stage:
    """Return the card of the fused run. The locations of its sources are recorded, but not part of its identity."""
    first = runs[0]
    names = ("policy", "env", "samples", "seed")
    sources = [
        {name: run.stage.inputs[name] for name in names} | {"episodes": file_digest(run.folder / EPISODES)}
        for run in runs
    ]
    envs = sorted({run.stage.inputs["env"] for run in runs})
    policies = sorted((run.stage.inputs["policy"], run.stage.inputs["samples"]) for run in runs)
    hashes = {
        "env": envs[0] if len(envs) == 1 else digest(envs),
        "policy": digest({"fused": policies, "k": k, "cap": cap}),
        "index": first.stage.inputs["index"],
    }
    kept = {name: first.stage.inputs[name] for name in ("dataset", "split", "tasks", "reward")}
    kept |= task_hashes(list(first.tasks.values()))
    inputs = {**kept, "samples": 1, "seed": first.stage.inputs["seed"], **hashes, "fused": sources, "k": k, "cap": cap}
    policy = "fused:" + "+".join(dict.fromkeys(run.policy for run in runs))
    card = run_stage(first.config, policy, inputs, first.index, hashes)
    extra = {"source": first.dataset, "sources": [str(run.folder.resolve()) for run in runs], "taken": _taken(runs)}
    return msgspec.structs.replace(card, outputs={**card.outputs, **extra})


def _taken(runs: Sequence[RunView]) -> dict[str, dict[str, float]]:
    """Return the total cost of the rollouts of each task."""
    taken: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for run in runs:
        for episode in run.episodes.values():
            for task_id, metrics in task_metrics([episode], run.tasks, run.config).items():
                for name in metrics:
                    if name in SUMMED or name.startswith(TOOL):
                        taken[task_id][name] += metrics[name]
    return {task_id: dict(sorted(sums.items())) for task_id, sums in sorted(taken.items())}


def _rollouts(runs: Sequence[RunView]) -> dict[str, list[Episode]]:
    """Return the rollouts of each task that has any, in the order of runs and samples."""
    task_ids = dict.fromkeys(key.task_id for run in runs for key in sorted(run.episodes))
    return {task_id: [episode for run in runs for episode in run.samples(task_id)] for task_id in task_ids}


def _fused(task: Task, rollouts: Sequence[Episode], stage: Stage, k: int, cap: int) -> Episode:
    hashes = Hashes(stage.inputs["env"], stage.inputs["policy"], stage.inputs["index"])
    valid = [episode for episode in rollouts if episode.status is not Status.INFRA_ERROR]
    stop = _stop_reason(valid)
    pool = tuple(dict.fromkeys(unit for episode in valid for unit in episode.pool))
    return Episode(
        episode_id=digest([task.public(), hashes.env, hashes.policy, hashes.index])[:16],
        task=task.public(),
        seed=stage.inputs["seed"],
        stop_reason=stop,
        status=STATUS_OF[stop],
        curated=_fused_set(valid, k, cap),
        pool=pool,
        aliases=_aliases(valid, set(pool)),
        hashes=hashes,
        unit=rollouts[0].unit,
        stage_ms=_spent(rollouts),
        error=None if valid else "the infrastructure broke every rollout",
    )


def _spent(rollouts: Sequence[Episode]) -> dict[str, float]:
    """Return the milliseconds of all rollouts together."""
    stages = sorted({stage for episode in rollouts for stage in episode.stage_ms})
    return {stage: math.fsum(episode.stage_ms.get(stage, 0.0) for episode in rollouts) for stage in stages}


def _stop_reason(valid: Sequence[Episode]) -> StopReason:
    """Return how a fused episode ended: well if any rollout delivered, in a fault only if all were broken."""
    if not valid:
        return StopReason.FAULT
    delivered = any(episode.status is not Status.POLICY_ERROR for episode in valid)
    return StopReason.END_SEARCH if delivered else StopReason.FORMAT_LIMIT


def _fused_set(rollouts: Sequence[Episode], k: int, cap: int) -> tuple[Curated, ...]:
    delivered = [episode.curated for episode in rollouts if episode.status is not Status.POLICY_ERROR]
    tags: dict[str, Tag] = {}
    for entry in chain.from_iterable(delivered):
        tags[entry.unit_id] = min(entry.tag, tags.get(entry.unit_id, entry.tag), key=TAGS.index)
    ranked = [sorted(curated, key=lambda entry: entry.rank) for curated in delivered]
    fused = rrf([[ChunkId(entry.unit_id) for entry in curated] for curated in ranked], k)
    return tuple(Curated(UnitId(name), tags[name], rank) for rank, (name, _) in enumerate(fused[:cap], start=1))


def _aliases(rollouts: Sequence[Episode], pool: set[UnitId]) -> dict[UnitId, UnitId]:
    """Return near duplicates as the first rollout hid them, without units that another rollout pooled."""
    aliases: dict[UnitId, UnitId] = {}
    for episode in rollouts:
        for alias, representative in episode.aliases.items():
            if alias not in pool:
                aliases.setdefault(alias, representative)
    return aliases


Taken = Mapping[str, Mapping[str, float]]


def write_fused(fusion: Fusion, runs: Sequence[RunView], out: Path, force: bool = False) -> dict[str, Any]:
    """Write the run folder of a fusion unless it exists, and return its metrics.

    Its metrics, tables and resources show the total cost of the rollouts (turns, calls, tokens, seconds).

    Args:
        runs: the fused runs.
        force: write it again, whatever earlier run is in the folder.

    Raises:
        UsageError: the folder is one of the runs, holds another run or something that is not a run, or cannot be
            written.
    """
    if out.resolve() in {run.folder.resolve() for run in runs}:
        raise UsageError(f"{out} is one of the runs to fuse: choose another --out")
    if force:
        clear_run(out)
    refuse_other_run(fusion.stage, out)
    if not (fusion.stage.is_done(out) and (out / METRICS).is_file()):
        _write_episodes(fusion, runs[0], out)
    # Repeated even if the episodes were already there: an earlier call may have been interrupted in between.
    return _tell_taken(fusion, runs, out)


def _write_episodes(fusion: Fusion, first: RunView, out: Path) -> None:
    inputs, config = fusion.stage.inputs, first.config
    policy = str(fusion.stage.outputs["policy"])
    tasks = list(first.tasks.values())
    evaluation = Evaluation(
        inputs["dataset"], inputs["split"], tasks, first.index, policy, config, inputs["samples"], inputs["seed"]
    )
    clear_run(out)
    with under_way(fusion.stage, out), EpisodeStore(out) as store:
        provenance.begin(out, evaluation.facts(fusion.stage), runs=True)
        for episode in fusion.episodes:
            store.append(episode)
        provenance.end(out)
        write_metrics(evaluation, fusion.stage, out)


def _tell_taken(fusion: Fusion, runs: Sequence[RunView], out: Path) -> dict[str, Any]:
    """Replace the fused episodes' costs, which are empty, with those of the rollouts."""
    taken: Taken = fusion.stage.outputs["taken"]
    config = runs[0].config
    metrics = read_json(out / METRICS)
    metrics = fused_metrics(metrics) | _intervals(taken, config.machine.bootstrap, fusion.stage.inputs["seed"])
    metrics["tool_mix"] = _tool_mix(taken)
    episodes = (episode for run in runs for episode in run.episodes.values())
    write_json(out / METRICS, metrics)
    write_json(out / RESOURCES, _of_rollouts(resources(episodes, config)))
    table = task_table(
        fusion.episodes,
        runs[0].tasks,
        config,
        lambda task_id, found: fused_metrics(found) | dict(taken.get(task_id, {})),
    )
    write_atomically(out / TASKS, table.encode())
    (out / REPORT).unlink(missing_ok=True)
    (out / VIEW).unlink(missing_ok=True)
    return metrics


def _intervals(taken: Taken, resamples: int, seed: int) -> dict[str, dict[str, float]]:
    values = {name: [sums[name] for sums in taken.values() if name in sums] for name in _names(taken)}
    return {name: msgspec.structs.asdict(bootstrap_mean(of, resamples, seed)) for name, of in values.items()}


def _tool_mix(taken: Taken) -> dict[str, float]:
    tools = [name for name in _names(taken) if name.startswith(TOOL)]
    calls = {name.removeprefix(TOOL): sum(sums.get(name, 0.0) for sums in taken.values()) for name in tools}
    total = sum(calls.values())
    return {name: count / total for name, count in calls.items() if count}


def _of_rollouts(found: Mapping[str, Any]) -> dict[str, Any]:
    """Rename resources after the rollouts that they were summed over."""
    return {
        name.replace("episode", "rollout"): _of_rollouts(value) if isinstance(value, Mapping) else value
        for name, value in found.items()
    }


def _names(taken: Taken) -> list[str]:
    return sorted({name for sums in taken.values() for name in sums})
