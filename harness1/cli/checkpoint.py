"""What a training says of itself, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from harness1.policy.checkpoint import Checkpoint


def said(values: Mapping[str, float]) -> str:
    """Some numbers in a line."""
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def print_checkpoint(done: Checkpoint, out: Path, unit: str, as_json: bool, which: str = "best") -> None:
    """The checkpoint that a training ended with, and its metrics on held-out tasks.

    Args:
        unit: what the trainer counts: `step` or `batch`.
    """
    if as_json:
        print(msgspec.json.encode({"checkpoint": str(out), unit: done.step, "metrics": done.metrics}).decode())
        return
    console = Console(highlight=False)
    table = Table(title=f"the {which} checkpoint, of {unit} {done.step}", title_justify="left")
    table.add_column("held out")
    table.add_column("value", justify="right")
    for name, value in done.metrics.items():
        table.add_row(name, f"{value:.3f}")
    if done.metrics:
        console.print(table)
    console.print(f"The checkpoint is in {out}: harness1 eval DATASET --policy hf:{out}")
