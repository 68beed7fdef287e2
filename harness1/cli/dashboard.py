"""An evaluation or a training run in progress, and what it came to."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console

from harness1.cli.printing import print_json, say_torn
from harness1.cli.progress import Board, Clock, Terminal, View, make_table
from harness1.episodes.jobs import Depths
from harness1.errors import InfrastructureFault
from harness1.eval.evaluate import Evaluation, ensure_run, evaluate
from harness1.eval.metrics import HEADLINE, broken_lines, fault_reasons
from harness1.models.checkpoint import Checkpoint
from harness1.records import Episode, Gold, Status
from harness1.reward.measures import measure_outcome
from harness1.runs.files import read_stage
from harness1.training.log import read_log, validation_values
from harness1.viewer.report import ensure_report

NORMAL_95 = 1.959964
"""Standard deviations on either side of the middle 95 % of a normal distribution."""


class RunningMean:
    """The mean over tasks of the means over their samples, with its 95 % interval by the normal approximation."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[int, float]] = {}

    @property
    def tasks(self) -> int:
        return len(self._tasks)

    def add(self, task_id: str, value: float) -> None:
        """Add a sample of a task."""
        count, before = self._tasks.get(task_id, (0, 0.0))
        self._tasks[task_id] = count + 1, before + (value - before) / (count + 1)

    def interval(self) -> tuple[float, float, float] | None:
        """Return mean, lower and upper bound, equal for one task; None for no task. Bounds are not cut to [0, 1]."""
        if not self._tasks:
            return None
        means = [mean for _, mean in self._tasks.values()]
        mean, count = fmean(means), len(means)
        half = NORMAL_95 * float(np.std(means, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
        return mean, mean - half, mean + half


class EpisodeProgress:
    """Counts the episodes of an evaluation in progress, including those of earlier sessions."""

    def __init__(self) -> None:
        self.recall = RunningMean()
        """Recall of the curated sets, over the episodes that the infrastructure did not break."""
        self.failures: Counter[str] = Counter()
        """Episodes by each status other than `completed`; `format errors` and `tool errors` count single turns."""
        self.stops: Counter[str] = Counter()
        """Episodes by the reason for their end."""
        self._whole = self._turns = self._prompt_tokens = self._output_tokens = 0

    def add(self, episode: Episode, gold: Gold | None) -> None:
        """Count a finished episode; raise UsageError if the gold is empty."""
        self.stops[episode.stop_reason.value] += 1
        if episode.status is not Status.COMPLETED:
            self.failures[episode.status.value] += 1
        if episode.status is Status.INFRA_ERROR:
            return
        self._whole += 1
        self._turns += sum(turn.action is not None for turn in episode.turns)
        self._prompt_tokens += sum(turn.prompt_tokens for turn in episode.turns)
        self._output_tokens += sum(len(call.output_ids) for turn in episode.turns for call in turn.calls)
        if gold is not None:
            result = measure_outcome(episode, gold)
            self.recall.add(episode.task.task_id, result.recall)
            self.failures += Counter({"format errors": result.format_errors, "tool errors": result.tool_errors})

    def means(self) -> tuple[float, float, float]:
        """Return the mean turns, prompt tokens and output tokens of episodes that the infrastructure did not break."""
        whole = max(1, self._whole)
        return self._turns / whole, self._prompt_tokens / whole, self._output_tokens / whole


RECENT = 5
"""Number of steps in a recent mean, which is compared with the mean of as many steps before."""


class StepProgress:
    """Keeps the values of the last steps of a training run and of its last validation."""

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, float]] = deque(maxlen=2 * RECENT)
        self.validation: dict[str, float] = {}
        self.validation_step = 0
        """The step of the last validation."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a step, or of a validation after it."""
        if found := validation_values(values):
            self.validation, self.validation_step = found, step
        elif values:
            self._recent.append(values)

    @property
    def values(self) -> Mapping[str, float]:
        """The values of the last step."""
        return self._recent[-1] if self._recent else {}

    def trend(self, name: str) -> float | None:
        """Return the mean of a value over the last steps minus that over as many before; None if there are fewer."""
        known = [each[name] for each in self._recent if name in each]
        return fmean(known[RECENT:]) - fmean(known[:RECENT]) if len(known) == 2 * RECENT else None

    def tokens_per_second(self) -> float | None:
        """Return the speed over the last steps, without the time between them; None if none was timed."""
        timed = [each for each in self._recent if each.get("seconds") and "tokens" in each]
        seconds = sum(each["seconds"] for each in timed)
        return sum(each["tokens"] for each in timed) / seconds if seconds else None


OF = "{task.completed:,.0f} of {task.total:,.0f}"


Words = Mapping[str, str]
"""Names of values, each with its word in the row."""
BUFFER: Words = MappingProxyType({"groups/waiting": "waiting", "staleness": "staleness", "staleness_max": "at most"})
DROPPED: Words = MappingProxyType({"groups/filtered": "filtered", "groups/stale": "too old", "groups/faulty": "broken"})
FAILURES: Words = MappingProxyType(
    {"format_failures": "format", "tool_errors": "tools", "zero_variance": "groups without a difference"}
)
SECONDS: Words = MappingProxyType({"seconds": "in all", "wait_seconds": "waiting", "train_seconds": "training"})


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
        self._progress = EpisodeProgress()
        self._depths: Depths = dict

    def earlier(self, episode: Episode) -> None:
        """Take an episode of an earlier session."""
        with self._lock:
            self._progress.add(episode, self._golds[episode.task.task_id])

    def episode(self, episode: Episode) -> None:
        """Take an episode that has just finished."""
        self.earlier(episode)
        self.advance()

    def queues(self, depths: Depths) -> None:
        """Take the function that gives the depths of queues (see `run_episodes`)."""
        self._depths = depths

    def view(self) -> View:
        """Return the recall so far, the mean cost of an episode, and the ends of episodes by kind."""
        done = self._progress
        recall = "" if (interval := done.recall.interval()) is None else _interval(interval)
        failures = _word_counts(dict(done.failures.most_common()))
        rows = (
            ("recall", recall and f"{recall}, curated, over {done.recall.tasks} tasks"),
            ("an episode", _episode(*done.means())),
            ("queues", _word_counts(self._depths())),
            ("ended by", _word_counts(dict(done.stops.most_common()))),
            ("failures", failures or "none"),
        )
        return View(rows, (recall and f"recall {recall}", failures))


class TrainingBoard(Board):
    """Listens to a training run: `listen` is the `on_step` of a trainer that counts a `unit`, such as `batch`; `names`:
    the values to show, the most interesting first."""

    def __init__(
        self,
        title: str,
        unit: str,
        names: Sequence[str],
        console: Console | None = None,
        clock: Clock = time.monotonic,
        hidden: bool = False,
    ) -> None:
        super().__init__(title, f"{unit} {OF}", console, clock, hidden)
        self._progress = StepProgress()
        self._unit, self._names = unit, names

    def listen(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; print those of a validation in a line that stays."""
        with self._lock:
            self._progress.add(step, values)
        self.begin(step, steps)
        if found := validation_values(values):
            self.say(f"{self._unit} {step}, held out: {list_values(found, self._names)}")
        self.advance(step)

    def view(self) -> View:
        """Return the values of the last steps and of the last validation."""
        done, values, speed = self._progress, self._progress.values, self._progress.tokens_per_second()
        validation = list_values(done.validation, self._names)
        rows = (
            ("values", _with_trends(done, self._names)),
            ("speed", "" if speed is None else f"{speed:,.0f} tokens/s"),
            ("seconds", _word_values(values, SECONDS, "{:.1f}")),
            ("buffer", _word_values(values, BUFFER, "{:.3g}")),
            ("dropped", _word_values(values, DROPPED, "{:.0f}")),
            ("failures", _word_values(values, FAILURES, "{:.1%}")),
            ("held out", validation and f"{validation} ({self._unit} {done.validation_step})"),
        )
        return View(rows, (list_values(values, self._names),))


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


def list_values(values: Mapping[str, float], names: Sequence[str]) -> str:
    """Return the named values that exist, with their names, in this order."""
    return _word_values(values, {name: name for name in names}, "{:.3g}")


def _word_values(values: Mapping[str, float], words: Words, form: str) -> str:
    return ", ".join(f"{word} {form.format(values[name])}" for name, word in words.items() if name in values)


def _with_trends(progress: StepProgress, names: Sequence[str]) -> str:
    parts = []
    for name in (name for name in names if name in progress.values):
        trend = progress.trend(name)
        parts.append(f"{name} {progress.values[name]:.3g}" + ("" if trend is None else f" ({trend:+.2g})"))
    return ", ".join(parts)


def _interval(interval: tuple[float, float, float]) -> str:
    mean, low, high = interval
    return f"{mean:.3f} ({max(0.0, low):.3f} to {min(1.0, high):.3f})"


def _episode(turns: float, prompt_tokens: float, output_tokens: float) -> str:
    read = f", {prompt_tokens:,.0f} tokens read" if prompt_tokens else ""
    written = f", {output_tokens:,.0f} written" if output_tokens else ""
    return f"{turns:.1f} turns{read}{written}"


def _word_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def print_metrics(metrics: Mapping[str, Any], title: str, out: Path) -> None:
    """Print the headline metrics with their 95 % intervals, and how many episodes broke, and why."""
    table = make_table("metric", "mean", "95 % interval")
    for name in HEADLINE:
        value = metrics.get(name)
        if value is not None and value["mean"] is not None:
            table.add_row(name, _figure(value["mean"]), f"{_figure(value['low'])} to {_figure(value['high'])}")
    for count, why in broken_lines(metrics):
        table.add_row("broken", count, why)
    console = Terminal()
    console.print(title, soft_wrap=True)
    if not metrics["scored"]:
        console.print("No task could be scored.")
    console.print(table)
    failures = ", ".join(f"{count} {name}" for name, count in metrics["failures"].items() if count) or "none"
    console.print(f"{metrics['tasks']} tasks, failures: {failures}. Everything is in {out}.", soft_wrap=True)
    for reason, times in fault_reasons(metrics).items():
        console.print(f"{times:,} of the infrastructure: {reason}", soft_wrap=True)
    stage = read_stage(out)
    if stage is not None and "trec_ids" in stage.outputs:
        console.print(f"Some ids hold white space: in the TREC runs all are {stage.outputs['trec_ids']}.")


def refuse_faults(broken: Mapping[str, int], episodes: int, allowed: int) -> None:
    """Raise InfrastructureFault if the infrastructure broke more than the `allowed` of so many episodes; `broken` has
    their numbers by the run that they are of."""
    if (count := sum(broken.values())) > allowed:
        where = ", ".join(f"{each} in {name}" for name, each in broken.items() if each) if len(broken) > 1 else ""
        raise InfrastructureFault(
            f"the infrastructure broke {count:,} of {episodes:,} episodes{f' ({where})' if where else ''}:"
            f" the same command plays them again, and --allow-faults {count} accepts them"
        )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def print_checkpoint(done: Checkpoint, out: Path, unit: str, as_json: bool, which: str = "best") -> None:
    """Print the final checkpoint of a training run, after so many of a `unit`, and its metrics on held-out tasks beside
    those of the start."""
    began = next((found for line in read_log(out) if line["step"] == 0 and (found := validation_values(line))), {})
    if as_json:
        print_json({"checkpoint": str(out), unit: done.step, "metrics": done.metrics, "start": began})
        return
    console = Terminal()
    table = make_table("held out", "start", "checkpoint")
    for name, value in done.metrics.items():
        table.add_row(name, f"{began[name]:.3f}" if name in began else "", f"{value:.3f}")
    if done.metrics:
        console.print(f"the {which} checkpoint, of {unit} {done.step}")
        console.print(table)
    console.print(f"The checkpoint is in {out}: harness1 eval DATASET --policy hf:{out}")
