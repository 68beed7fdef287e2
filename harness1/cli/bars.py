"""Bars and counts on standard error for work that needs no dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

from harness1.cli.printing import say
from harness1.cli.terminal import Terminal
from harness1.data.source import Source
from harness1.retrieval.corpus import Document
from harness1.retrieval.dense.vectors import Progress as Embedded

Item = TypeVar("Item")
SHOWN = 20
"""Documents left out that are named."""


def progress_of_work() -> Progress:
    """Return a bar that stays, with the amount done, the total, the elapsed time and the time left."""
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(_description(), BarColumn(), MofNCompleteColumn(), *times, console=Terminal(stderr=True))


@contextmanager
def progress_of_parts() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a part of the work, the amount done, and the total (0 if unknown)."""
    columns = (_description(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Terminal(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=None)
        yield lambda part, done, of: progress.update(bar, description=part, completed=done, total=of or None)


@contextmanager
def count_of_documents(what: str) -> Iterator[Callable[[], None]]:
    """Yield a function that counts a document if standard error is a terminal."""
    counted = TextColumn("{task.description}: {task.completed} documents", markup=False)
    with _on_terminal(SpinnerColumn(), counted, TimeElapsedColumn()) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda: progress.advance(bar)


@contextmanager
def read_aloud(source: Source) -> Iterator[tuple[Iterator[Document], Embedded]]:
    """Open the documents of a source, with a callback for the progress of their embeddings; show both, and print at the
    end what was left out."""
    columns = (SpinnerColumn(), _description(), MofNCompleteColumn(), TimeElapsedColumn())
    with _on_terminal(*columns, TextColumn("{task.fields[rate]}")) as progress:
        reading = progress.add_task(f"indexing {source.name}", total=None, rate="")
        embedding = progress.add_task("embedding chunks", total=None, visible=False, rate="")

        def embedded(done: int, fresh: int) -> None:
            if not progress.tasks[embedding].visible:
                progress.reset(embedding, visible=True)
            rate = fresh / max(progress.tasks[embedding].elapsed or 0.0, 1e-3)
            progress.update(embedding, completed=done, rate=f"{rate:.0f}/s")

        def counted() -> Iterator[Document]:
            for document in source.documents():
                yield document
                progress.advance(reading)

        yield counted(), embedded
    if source.problems:
        say(f"{len(source.problems)} left out of {source.name}:")
    for problem in source.problems[:SHOWN]:
        say(f"left out: {problem}")
    if len(source.problems) > SHOWN:
        say(f"and {len(source.problems) - SHOWN} more")


def tracked(items: Iterable[Item], doing: str, count: int) -> Iterable[Item]:
    """Return the items, with a bar on a terminal; elsewhere a bar would leave an empty line behind."""
    console = Terminal(stderr=True)
    return track(items, doing, total=count, console=console, transient=True, disable=not console.is_terminal)


def _description() -> TextColumn:
    return TextColumn("{task.description}", markup=False)


def _on_terminal(*columns: ProgressColumn) -> Progress:
    console = Terminal(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
