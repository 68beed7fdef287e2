"""harness1 eval --ablations: measure the value of each mechanism of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from harness1.cli.dashboard import evaluated
from harness1.cli.printing import print_result, say
from harness1.cli.results import refuse_faults
from harness1.cli.terminal import Terminal
from harness1.eval.ablations import ABLATIONS, COLUMNS, LEGEND, AblationTable, ablate, cells, conditions, title
from harness1.eval.evaluate import Evaluation, Play
from harness1.viewer.report import ensure_report

WIDEST = 1000
"""A width in characters that no table reaches."""


def ablation_names(words: str) -> tuple[str, ...]:
    """Return the ablations that a user names, separated by commas; `all` means all of them."""
    named = [word.strip() for word in words.split(",")]
    return tuple(dict.fromkeys(name for word in named for name in (ABLATIONS if word == "all" else (word,))))


def run_ablations(
    evaluation: Evaluation, out: Path, words: str, allow_faults: int, *, force: bool, rescored: bool, as_json: bool
) -> None:
    """Play an evaluation with and without mechanisms, and print the table.

    Args:
        words: the argument of `ablation_names`.
        allow_faults: as in `refuse_faults`, of all conditions together.
    """
    names = ablation_names(words)
    played = conditions(evaluation, names)
    table = ablate(evaluation, out, names, force=force, rescored=rescored, play=_announced(len(played)))
    for name in played:
        ensure_report(out / name, evaluation.tasks)
    print_result(table, as_json, print_ablations, out)
    broken = {each.name: each.broken for each in table.conditions}
    refuse_faults(broken, evaluation.episodes * len(broken), allow_faults)


def print_ablations(table: AblationTable, out: Path) -> None:
    """Print the table, and below it the mechanisms that help."""
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == COLUMNS[0] else "right", no_wrap=True)
    for line in cells(table):
        shown.add_row(*line)
    console = Terminal()
    # Numbers are never cut off: if the table is wider than the terminal, its lines wrap.
    width = console.measure(shown, options=console.options.update(width=WIDEST)).maximum
    console.print(title(table), soft_wrap=True)
    Terminal(width=max(console.width, width)).print(shown)
    for text in filter(None, (LEGEND, table.verdict, table.remarks)):
        console.print(text)
    console.print(f"Everything is in {out}.", soft_wrap=True)


def _announced(total: int) -> Play:
    """Return a function that prints the number of the condition on standard error, and then plays it."""
    numbers = count(1)

    def told(evaluation: Evaluation, folder: Path) -> Mapping[str, Any]:
        say(f"condition {next(numbers)} of {total}: {folder.name}")
        return evaluated(evaluation, folder)

    return told
