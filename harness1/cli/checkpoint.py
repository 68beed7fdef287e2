"""What a training ended with, whichever it was."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from harness1.models.checkpoint import Checkpoint
from harness1.train.log import read_log, validation_values


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
    console = Console(highlight=False, markup=False)
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
    return next((found for line in read_log(out) if line["step"] == 0 and (found := validation_values(line))), {})
