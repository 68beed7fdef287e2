"""harness1 compare: compare runs with the first of them, task by task."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import msgspec
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from harness1.cli.options import Json, MovedDataset
from harness1.cli.printing import print_json
from harness1.cli.terminal import Terminal
from harness1.errors import UsageError
from harness1.eval.compare import Block, Grid, Links, blocks, markdown
from harness1.eval.compare import compare as compare_runs
from harness1.eval.run import read_run
from harness1.runs.files import write_atomically

LEAST = 16
"""Minimum width of the flexible column of a table, in characters."""


def compare(
    runs: Annotated[list[Path], Argument(help="Run folders; each is compared with the first.", metavar="RUN")],
    metric: Annotated[str, Option(help="The metric by which tasks are won and lost.")] = "curated_recall",
    top: Annotated[int, Option(help="How many of the most changed tasks to show.", min=0)] = 10,
    equal_size: Annotated[
        bool, Option("--equal-size", help="Cut the ranked sets of both runs to the smaller size, task by task.")
    ] = False,
    view: Annotated[Path | None, Option(help="Link tasks to this viewer file of the runs.", metavar="FILE")] = None,
    dataset: MovedDataset = None,
    out: Annotated[Path | None, Option(help="Also write it as Markdown.", metavar="FILE.md")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs on the same tasks: paired differences with intervals and significance, and what changed most.

    Differences are a run's value minus the first's. With more than two runs, p-values are corrected for their number.

    Example: harness1 compare runs/bm25 runs/scripted --view runs/both.html
    """
    comparison = compare_runs([read_run(run, dataset) for run in runs], metric, top, equal_size)
    command = shlex.join(["harness1", "view", *map(str, runs), "--out", str(view or "view.html")])
    parts = list(blocks(comparison, str(view) if view else ""))
    if out is not None:
        _write(out, parts)
    if as_json:
        print_json({**msgspec.to_builtins(comparison), "view": command})
        return
    console = Terminal()
    for part in parts:
        _print(console, part)
    console.print(f"To look at them side by side: {command}", soft_wrap=True)


def _write(out: Path, parts: list[Block]) -> None:
    try:
        write_atomically(out, markdown(parts).encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error


def _print(console: Console, part: Block) -> None:
    """Print a block and an empty line; on a terminal tables are ruled, in a pipe they are plain."""
    if isinstance(part, str):
        console.print(part, soft_wrap=not console.is_terminal)
    elif isinstance(part, Links):
        for name, address in part.places:
            console.print(f"{name}: {address}", soft_wrap=True)
    else:
        table, width = _table(part, console.is_terminal, console.width)
        # Without enough room a column of numbers would be cut: a longer line can still be read.
        (console if width <= console.width else Terminal(width=width)).print(table)
    console.print()


def _table(grid: Grid, ruled: bool, width: int) -> tuple[Table, int]:
    """Return a grid of at most `width` characters, as far as its flexible column can shrink, and the width it needs."""
    lengths = [max(map(cell_len, column)) for column in zip(grid.columns, *grid.rows, strict=True)]
    gap = 3 if ruled else 2
    others = sum(length + gap for number, length in enumerate(lengths) if number != grid.flexible)
    flexible = 0 if grid.flexible is None else min(LEAST, lengths[grid.flexible]) + gap
    table = Table(box=SIMPLE_HEAD if ruled else None, padding=(0, 1), pad_edge=False, show_edge=False)
    for number, name in enumerate(grid.columns):
        room = max(LEAST, width - others - gap) if number == grid.flexible else None
        cropped = name == "query"
        table.add_column(
            name,
            justify="right" if number in grid.numbers else "left",
            max_width=room,
            no_wrap=cropped or room is None,
            overflow="ellipsis" if cropped else "fold",
        )
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table, others + flexible
