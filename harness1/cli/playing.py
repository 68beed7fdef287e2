"""What the verbs that play tasks share: an evaluation in progress, what it measured, and the comparison of several."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from harness1.cli.printing import print_json, put, say_torn
from harness1.cli.progress import OF, Board, Terminal, print_table
from harness1.errors import InfrastructureFault
from harness1.eval.compare import Comparison, blocks
from harness1.eval.evaluate import Evaluation, ensure_run
from harness1.eval.evaluate import evaluate as play_evaluation
from harness1.eval.metrics import HEADLINE, broken_lines, fault_reasons
from harness1.records import Episode, Gold, Status
from harness1.reward.measures import measure_outcome
from harness1.runs.files import read_stage
from harness1.viewer.report import ensure_report


class EvaluationBoard(Board):
    """Listens to `evaluate`: its mean recall so far and its failures. `golds`: those of all tasks, by their ids."""

    def __init__(self, title: str, golds: Mapping[str, Gold | None], **shown: Any) -> None:
        super().__init__(title, f"{OF} episodes", **shown)
        self._golds, self._failures = golds, Counter[str]()
        self._recall, self._scored = 0.0, 0

    def episode(self, episode: Episode) -> None:
        """Take an episode that has just finished; what the infrastructure broke has no recall."""
        gold = self._golds[episode.task.task_id]
        if episode.status is not Status.COMPLETED:
            self._failures[episode.status.value] += 1
        if gold is not None and episode.status is not Status.INFRA_ERROR:
            self._recall, self._scored = self._recall + measure_outcome(episode, gold).recall, self._scored + 1
        self.advance()

    def parts(self) -> Sequence[str]:
        """Return both in words."""
        recall = f"recall {self._recall / self._scored:.3f}" if self._scored else ""
        return recall, ", ".join(f"{count:,} {name}" for name, count in self._failures.most_common())


def evaluate_aloud(evaluation: Evaluation, out: Path, force: bool = False) -> Mapping[str, Any]:
    """Complete a run folder under a bar, and write its report; return its metrics. `force`: begin again."""

    def play(evaluation: Evaluation, out: Path) -> Mapping[str, Any]:
        golds = {task.task_id: task.gold for task in evaluation.tasks}
        with EvaluationBoard(f"{evaluation.policy} on {evaluation.dataset} ({out.name})", golds) as board:
            return play_evaluation(evaluation, out, board.begin, board.episode, partial(say_torn, out))

    metrics = ensure_run(evaluation, out, play, force=force)
    ensure_report(out, evaluation.tasks)
    return metrics


def print_metrics(metrics: Mapping[str, Any], title: str, out: Path) -> None:
    """Print the headline metrics with their 95 % intervals, and how many episodes broke, and why."""
    rows = []
    for name in HEADLINE:
        if (value := metrics.get(name)) and value["mean"] is not None:
            mean, low, high = (f"{each:,.{0 if abs(each) >= 1000 else 3}f}" for each in value.values())
            rows.append((name, mean, f"{low} to {high}"))
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


def print_comparison(comparison: Comparison, runs: list[Path], *, as_json: bool) -> None:
    """Print a comparison of some run folders, and the command that shows them."""
    command = shlex.join(["harness1", "view", *map(str, runs), "--out", "view.html"])
    if as_json:
        print_json({**msgspec.to_builtins(comparison), "view": command})
        return
    console = Terminal()
    for part in blocks(comparison):
        if isinstance(part, str):
            console.print(part, soft_wrap=not console.is_terminal)
        else:
            print_table(part.columns, part.rows, part.numbers, part.flexible)
        console.print()
    console.print(f"To look at them side by side: {command}", soft_wrap=True)
