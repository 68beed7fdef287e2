"""The final output of verbs: JSON, or the tables of evaluations and training runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from harness1.cli.printing import print_json
from harness1.cli.terminal import Terminal
from harness1.errors import InfrastructureFault
from harness1.eval.metrics import HEADLINE, broken_lines, fault_reasons
from harness1.models.checkpoint import Checkpoint
from harness1.runs.files import read_stage
from harness1.training.log import read_log, validation_values


def headed(*columns: str, left: Collection[str] = ()) -> Table:
    """Return a table without rows: its first column and those named in `left` are flush left, others flush right."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in (columns[0], *left) else "right")
    return table


def print_metrics(metrics: Mapping[str, Any], title: str, out: Path) -> None:
    """Print the headline metrics with their 95 % intervals, and how many episodes broke, and why."""
    table = headed("metric", "mean", "95 % interval")
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
    """Refuse to call work done of which the infrastructure broke a part.

    Args:
        broken: episodes that it broke, by the run that they are of.
        episodes: all episodes of these runs.
        allowed: broken episodes that are accepted.

    Raises:
        InfrastructureFault: there are more.
    """
    if (count := sum(broken.values())) > allowed:
        where = ", ".join(f"{each} in {name}" for name, each in broken.items() if each) if len(broken) > 1 else ""
        raise InfrastructureFault(
            f"the infrastructure broke {count:,} of {episodes:,} episodes{f' ({where})' if where else ''}:"
            f" the same command plays them again, and --allow-faults {count} accepts them"
        )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def print_checkpoint(done: Checkpoint, out: Path, unit: str, as_json: bool, which: str = "best") -> None:
    """Print the final checkpoint of a training run, and its metrics on held-out tasks beside those of the start.

    Args:
        unit: the unit that the trainer counts: `step` or `batch`.
    """
    began = _at_start(out)
    if as_json:
        report = {"checkpoint": str(out), unit: done.step, "metrics": done.metrics, "start": began}
        print_json(report)
        return
    console = Terminal()
    table = headed("held out", "start", "checkpoint")
    for name, value in done.metrics.items():
        table.add_row(name, f"{began[name]:.3f}" if name in began else "", f"{value:.3f}")
    if done.metrics:
        console.print(f"the {which} checkpoint, of {unit} {done.step}")
        console.print(table)
    console.print(f"The checkpoint is in {out}: harness1 eval DATASET --policy hf:{out}")


def _at_start(out: Path) -> dict[str, float]:
    """Return the metrics on held-out tasks before the first step."""
    return next((found for line in read_log(out) if line["step"] == 0 and (found := validation_values(line))), {})
