"""A comparison as text and tables, the same for a terminal, a pipe and a Markdown file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness1.eval.compare.comparison import Comparison, Pairing, Side
from harness1.eval.compare.differences import Difference
from harness1.eval.statistics import probability

NAMES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
ADDRESS = "/:#,%.~-_"
"""Characters that are not escaped in an address."""
LONGEST = 12
"""Characters of the longest folder that names a column."""
COUNTED = ("set_size", "turns", "prompt_tokens", "prefill_tokens")
"""Metrics that are amounts, shown with one decimal."""


@dataclass(frozen=True)
class Grid:
    """A table of plain text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int]
    """Columns that are right-aligned."""
    flexible: int | None = None
    """The column that shrinks if there is no room."""


@dataclass(frozen=True)
class Links:
    """Named addresses."""

    places: tuple[tuple[str, str], ...]


Block = str | Grid | Links


def blocks(comparison: Comparison, viewer: str = "") -> Iterator[Block]:
    """Yield the comparison from top to bottom.

    Args:
        viewer: the viewer file that the changed tasks link to; empty: no links.
    """
    sides = [comparison.first, *(pair.second for pair in comparison.others)]
    first, *others = names = labels([side.folder for side in sides])
    rows = [
        (name, side.folder, side.policy, str(side.tasks), _broken(side))
        for name, side in zip(names, sides, strict=True)
    ]
    yield Grid(("run", "folder", "policy", "tasks", "broken"), tuple(rows), frozenset({3, 4}), flexible=1)
    for name, pair in zip(others, comparison.others, strict=True):
        yield from _pair(comparison, pair, first, name, viewer)


def labels(folders: Sequence[str]) -> list[str]:
    """Return a name for each run: that of its folder, or its place where two names are equal or one is long."""
    names = [one_line(Path(folder).name) for folder in folders]
    if len(set(names)) == len(names) and all(0 < len(name) <= LONGEST for name in names):
        return names
    return [NAMES[place] if place < len(NAMES) else f"run {place + 1}" for place in range(len(folders))]


def markdown(parts: Sequence[Block]) -> str:
    """Return the blocks as Markdown, with all special characters escaped."""
    return "\n\n".join(map(_markdown_block, parts)) + "\n"


def one_line(text: str) -> str:
    """Convert text from outside to one printable line."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _pair(comparison: Comparison, pair: Pairing, first: str, name: str, viewer: str) -> Iterator[Block]:
    left = " and ".join(f"{count} of {side}" for count, side in zip(pair.left_out, (first, name), strict=True))
    lost = f" (left out: {left}; {_why(pair, first, name)})" if any(pair.left_out) else ""
    cut = "; the sets of both are cut to the smaller one, task by task" if comparison.equal_size else ""
    yield f"{name} - {first}, {pair.tasks} common tasks{lost}{cut}"
    yield _metrics(pair.metrics, first, name)
    counts = f"{pair.wins} higher, {pair.losses} lower, {pair.ties} equal"
    yield f"{comparison.metric} of {name}, task by task: {counts}."
    if pair.cards or pair.settings:
        rows = [(key, _shown(a), _shown(b)) for key, (a, b) in {**pair.cards, **pair.settings}.items()]
        yield Grid(("what differs", first, name), tuple(rows), frozenset(), flexible=2)
    else:
        yield "Their cards and configurations are equal."
    if pair.changed or not pair.wins + pair.losses:
        yield f"Tasks that changed most in {comparison.metric}:"
        yield _changed(pair, first, name) if pair.changed else "None changed."
    if pair.changed and viewer:
        yield Links(tuple((one_line(each.task_id), f"{viewer}{each.address}") for each in pair.changed))


def _broken(side: Side) -> str:
    """Return how many episodes of a run the infrastructure broke, and whether they count."""
    return f"{side.broken:,} counted as 0" if side.broken and side.faults == "zero" else f"{side.broken:,}"


def _why(pair: Pairing, first: str, name: str) -> str:
    """Return why tasks are left out, with the number of each reason."""
    words = {
        "infrastructure": "{} broken by the infrastructure in {}",
        "not played": "{} not played in {}",
        "no such task": "{} not in {}",
    }
    found = []
    for key, count in pair.fell_out.items():
        side, _, reason = key.partition(": ")
        found.append(words[reason].format(count, first if side == "first" else name))
    return ", ".join(found)


def _metrics(metrics: dict[str, Difference], first: str, name: str) -> Grid:
    corrected = any(row.p_holm is not None for row in metrics.values())
    rows = []
    for metric, row in metrics.items():
        places = 3 if metric not in COUNTED else 1 if max(abs(row.first), abs(row.second)) < 1000 else 0
        between = row.difference
        rows.append(
            (
                metric,
                f"{row.first:,.{places}f}",
                f"{row.second:,.{places}f}",
                f"{between.mean:+,.{places}f}",
                f"{between.low:+,.{places}f} to {between.high:+,.{places}f}",
                probability(row.p if row.p_holm is None else row.p_holm),
            )
        )
    heads = ("metric", first, name, "diff", "95 % interval", "p (Holm)" if corrected else "p")
    return Grid(heads, tuple(rows), frozenset(range(1, 6)))


def _changed(pair: Pairing, first: str, name: str) -> Grid:
    rows = tuple(
        (one_line(each.task_id), f"{each.first:.3f}", f"{each.second:.3f}", f"{each.change:+.3f}", one_line(each.query))
        for each in pair.changed
    )
    return Grid(("task", first, name, "change", "query"), rows, frozenset({1, 2, 3}), flexible=4)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return "-" if value is None else one_line(str(value))


def _markdown_block(part: Block) -> str:
    if isinstance(part, str):
        return _cell(part)
    if isinstance(part, Grid):
        return _markdown_grid(part)
    return "\n".join(f"- [{_cell(name)}](<{quote(address, safe=ADDRESS)}>)" for name, address in part.places)


def _markdown_grid(grid: Grid) -> str:
    rule = ["---:" if column in grid.numbers else "---" for column in range(len(grid.columns))]
    rows = [grid.columns, tuple(rule), *(tuple(map(_cell, row)) for row in grid.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(text: str) -> str:
    """Escape characters that are special in Markdown or HTML."""
    return "".join(f"&#{ord(sign)};" if sign in "\\`*[]<>&|" else sign for sign in text)
