"""Bars and counts on standard error for work that needs no dashboard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
    track,
)

from harness1.cli.printing import say
from harness1.cli.progress import Pacing
from harness1.cli.terminal import Terminal
from harness1.data.source import Source
from harness1.retrieval.corpus import Document
from harness1.retrieval.embedder import Progress as Embedded

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
def progress_of_bytes() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a download, the bytes done, and their total (0 if unknown); lines elsewhere than on a
    terminal."""
    columns = (_description(), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _on_terminal(*columns) as progress:
        bar = progress.add_task("", total=None, visible=False)
        tell = _teller(progress)

        def show(part: str, done: int, of: int) -> None:
            progress.update(bar, description=part, completed=done, total=of or None, visible=True)
            tell(f"{part}: {done / 1e6:,.1f}{f' of {of / 1e6:,.1f}' if of else ''} MB", done / of if of else 0.0)

        yield show


@contextmanager
def count_of_documents(what: str) -> Iterator[Callable[[], None]]:
    """Yield a function that counts a document if standard error is a terminal."""
    counted = TextColumn("{task.description}: {task.completed} documents", markup=False)
    with _on_terminal(SpinnerColumn(), counted, TimeElapsedColumn()) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda: progress.advance(bar)


@contextmanager
def read_aloud(source: Source) -> Iterator[tuple[Iterator[Document], Embedded]]:
    """Open the documents of a source, with a callback for the progress of their embeddings; show both, in a pipe as a
    line every ten seconds, and print at the end what was left out."""
    columns = (SpinnerColumn(), _description(), MofNCompleteColumn(), TimeElapsedColumn())
    with _on_terminal(*columns, TextColumn("{task.fields[rate]}")) as progress:
        reading = progress.add_task(f"indexing {source.name}", total=None, rate="")
        embedding = progress.add_task("embedding chunks", total=None, visible=False, rate="")
        tell = _teller(progress)

        def embedded(done: int, fresh: int) -> None:
            if not progress.tasks[embedding].visible:
                progress.reset(embedding, visible=True)
            rate = fresh / max(progress.tasks[embedding].elapsed or 0.0, 1e-3)
            progress.update(embedding, completed=done, rate=f"{rate:.0f}/s")
            tell(f"embedding chunks of {source.name}: {done:,} done, {rate:.0f}/s")

        def counted() -> Iterator[Document]:
            for number, document in enumerate(source.documents(), start=1):
                yield document
                progress.advance(reading)
                tell(f"indexing {source.name}: {number:,} documents")

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


def _teller(progress: Progress) -> Callable[..., None]:
    """Return a function that prints a line when one is due, given the share of the work done, where no bar is shown."""
    pacing = Pacing(time.monotonic())

    def tell(line: str, share: float = 0.0) -> None:
        if progress.disable and pacing.due(time.monotonic(), share):
            say(line)

    return tell


def _description() -> TextColumn:
    return TextColumn("{task.description}", markup=False)


def _on_terminal(*columns: ProgressColumn) -> Progress:
    console = Terminal(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
