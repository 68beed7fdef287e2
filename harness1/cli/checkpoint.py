"""What a training says of itself, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from harness1.policy.checkpoint import Checkpoint
from harness1.train.log import StepListener, looked, read_log


def shown(progress: Progress, unit: str, names: Sequence[str]) -> StepListener:
    """A listener that moves a bar with some values beside it, and says what looks measure.

    Args:
        unit: what the trainer counts: `step` or `batch`.
        names: of the values that are said.
    """
    bars: list[TaskID] = []  # none before training begins, for what is refused needs none

    def show(step: int, steps: int, values: Mapping[str, float]) -> None:
        bars[:] = bars or [progress.add_task("training", total=steps, said="")]
        progress.update(bars[0], completed=step, total=steps)
        found = looked(values) or values
        line = ", ".join(f"{name} {found[name]:.3g}" for name in names if name in found)
        if found is not values:
            progress.console.print(f"{unit} {step}, held out: {line}", highlight=False)
        elif line:
            progress.update(bars[0], said=line)

    return show


def print_checkpoint(done: Checkpoint, out: Path, unit: str, as_json: bool, which: str = "best") -> None:
    """The checkpoint that a training ended with, and its metrics on held-out tasks beside those of the start.

    Args:
        unit: what the trainer counts: `step` or `batch`.
    """
    began = _at_start(out)
    if as_json:
        report = {"checkpoint": str(out), unit: done.step, "metrics": done.metrics, "start": began}
        print(msgspec.json.encode(report).decode())
        return
    console = Console(highlight=False)
    table = Table(title=f"the {which} checkpoint, of {unit} {done.step}", title_justify="left")
    table.add_column("held out")
    table.add_column("start", justify="right")
    table.add_column("checkpoint", justify="right")
    for name, value in done.metrics.items():
        table.add_row(name, f"{began[name]:.3f}" if name in began else "", f"{value:.3f}")
    if done.metrics:
        console.print(table)
    console.print(f"The checkpoint is in {out}: harness1 eval DATASET --policy hf:{out}")


def _at_start(out: Path) -> dict[str, float]:
    """What was measured on held-out tasks before the first step."""
    return next((found for line in read_log(out) if line["step"] == 0 and (found := looked(line))), {})
