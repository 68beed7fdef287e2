"""An evaluation in progress, and what it came to."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from harness1.cli.printing import put, say_torn
from harness1.cli.progress import OF, Board, Clock, View, print_table
from harness1.episodes.jobs import Depths
from harness1.errors import InfrastructureFault
from harness1.eval.evaluate import Evaluation, ensure_run, evaluate
from harness1.eval.metrics import HEADLINE, broken_lines, fault_reasons
from harness1.records import Episode, Gold, Status
from harness1.reward.measures import measure_outcome
from harness1.runs.files import read_stage
from harness1.viewer.report import ensure_report

NORMAL_95 = 1.959964  # standard deviations on either side of the middle 95 % of a normal distribution


class EvaluationBoard(Board):
    """Listens to `evaluate`: `begin`, `earlier`, `episode` and `queues`. `golds`: those of all tasks, by their ids."""

    def __init__(
        self,
        title: str,
        golds: Mapping[str, Gold | None],
        console: Console | None = None,
        clock: Clock = time.monotonic,
        hidden: bool = False,
    ) -> None:
        super().__init__(title, f"{OF} episodes", console, clock, hidden)
        self._golds = golds
        self._recalls: dict[str, list[float]] = {}
        self._failures, self._stops, self._costs = Counter[str](), Counter[str](), Counter[str]()
        self._depths: Depths = dict

    def earlier(self, episode: Episode) -> None:
        """Take an episode of an earlier session; what the infrastructure broke has no recall and no cost."""
        gold = self._golds[episode.task.task_id]
        with self._lock:
            self._stops[episode.stop_reason.value] += 1
            if episode.status is not Status.COMPLETED:
                self._failures[episode.status.value] += 1
            if episode.status is Status.INFRA_ERROR:
                return
            self._costs["episodes"] += 1
            self._costs["turns"] += sum(turn.action is not None for turn in episode.turns)
            self._costs["read"] += sum(turn.prompt_tokens for turn in episode.turns)
            self._costs["written"] += sum(len(call.output_ids) for turn in episode.turns for call in turn.calls)
            if gold is not None:
                result = measure_outcome(episode, gold)
                self._recalls.setdefault(episode.task.task_id, []).append(result.recall)
                self._failures += Counter({"format errors": result.format_errors, "tool errors": result.tool_errors})

    def episode(self, episode: Episode) -> None:
        """Take an episode that has just finished."""
        self.earlier(episode)
        self.advance()

    def queues(self, depths: Depths) -> None:
        """Take the function that gives the depths of queues (see `run_episodes`)."""
        self._depths = depths

    def view(self) -> View:
        """Return the recall so far, the mean cost of an episode, and the ends of episodes by kind."""
        recall, failures = describe_recall(self._recalls.values()), _word_counts(dict(self._failures.most_common()))
        turns, read, written = (self._costs[name] / max(1, self._costs["episodes"]) for name in COSTS)
        tokens = (f"{read:,.0f} tokens read" if read else "", f"{written:,.0f} written" if written else "")
        rows = (
            ("recall", recall and f"{recall}, curated, over {len(self._recalls)} tasks"),
            ("an episode", ", ".join(filter(None, (f"{turns:.1f} turns", *tokens)))),
            ("queues", _word_counts(self._depths())),
            ("ended by", _word_counts(dict(self._stops.most_common()))),
            ("failures", failures or "none"),
        )
        return rows, (recall and f"recall {recall}", failures)


COSTS = ("turns", "read", "written")


def describe_recall(recalls: Collection[Sequence[float]]) -> str:
    """Return the mean over tasks of their samples' means with its normal 95 % interval; an empty text for no task."""
    if not recalls:
        return ""
    means = [fmean(each) for each in recalls]
    mean, count = fmean(means), len(means)
    half = NORMAL_95 * float(np.std(means, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    return f"{mean:.3f} ({max(0.0, mean - half):.3f} to {min(1.0, mean + half):.3f})"


def _word_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def evaluate_aloud(evaluation: Evaluation, out: Path, force: bool = False) -> Mapping[str, Any]:
    """Complete a run folder under a dashboard, and write its report; return its metrics. `force`: begin again."""

    def play(evaluation: Evaluation, out: Path) -> Mapping[str, Any]:
        golds = {task.task_id: task.gold for task in evaluation.tasks}
        with EvaluationBoard(f"{evaluation.policy} on {evaluation.dataset} ({out.name})", golds) as board:
            return evaluate(
                evaluation, out, board.begin, board.episode, partial(say_torn, out), board.queues, board.earlier
            )

    metrics = ensure_run(evaluation, out, play, force=force)
    ensure_report(out, evaluation.tasks)
    return metrics


def print_metrics(metrics: Mapping[str, Any], title: str, out: Path) -> None:
    """Print the headline metrics with their 95 % intervals, and how many episodes broke, and why."""

    def figure(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"

    rows = [
        (name, figure(value["mean"]), f"{figure(value['low'])} to {figure(value['high'])}")
        for name in HEADLINE
        if (value := metrics.get(name)) and value["mean"] is not None
    ]
    put(title)
    if not metrics["scored"]:
        put("No task could be scored.")
    heads = ("metric", "mean", "95 % interval")
    print_table(heads, [*rows, *(("broken", count, why) for count, why in broken_lines(metrics))])
    failures = ", ".join(f"{count} {name}" for name, count in metrics["failures"].items() if count) or "none"
    put(f"{metrics['tasks']} tasks, failures: {failures}. Everything is in {out}.")
    for reason, times in fault_reasons(metrics).items():
        put(f"{times:,} of the infrastructure: {reason}")
    stage = read_stage(out)
    if stage is not None and "trec_ids" in stage.outputs:
        put(f"Some ids hold white space: in the TREC runs all are {stage.outputs['trec_ids']}.")


def refuse_faults(broken: Mapping[str, int], episodes: int, allowed: int) -> None:
    """Raise InfrastructureFault if the infrastructure broke more than `allowed` episodes: `broken` of each run."""
    if (count := sum(broken.values())) > allowed:
        where = ", ".join(f"{each} in {name}" for name, each in broken.items() if each) if len(broken) > 1 else ""
        raise InfrastructureFault(
            f"the infrastructure broke {count:,} of {episodes:,} episodes{f' ({where})' if where else ''}:"
            f" the same command plays them again, and --allow-faults {count} accepts them"
        )
