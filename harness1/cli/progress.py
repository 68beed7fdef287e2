"""Tables, and work in progress: bars on a terminal, plain lines elsewhere, with the speed and the time left."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
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
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from harness1.cli.printing import say
from harness1.plain import printable

if TYPE_CHECKING:
    from harness1.data.source import Source
    from harness1.retrieval.corpus import Document
    from harness1.retrieval.models import Progress as Embedded


class Terminal(Console):
    """A console for text from outside: no string is read as markup, and only styles of our own reach the terminal."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, quiet=quiet, width=width, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the parts of what is shown, each printable unless it moves the cursor of a live view."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(printable(part.text), part.style)


LEAST = 16  # minimum width of the flexible column of a table, in characters


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[int] | None = None,
    flexible: int | None = None,
) -> None:
    """Print plain text in a table. `numbers`: columns flush right (default: not the first); `flexible`: it shrinks."""
    rows, console = list(rows), Terminal()
    ruled = console.is_terminal
    lengths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    gap = 3 if ruled else 2
    others = sum(length + gap for at, length in enumerate(lengths) if at != flexible)
    width = others if flexible is None else others + min(LEAST, lengths[flexible]) + gap
    table = Table(box=SIMPLE_HEAD if ruled else None, padding=(0, 1), pad_edge=False, show_edge=False)
    for at, name in enumerate(columns):
        room = max(LEAST, console.width - others - gap) if at == flexible else None
        cropped = name == "query"
        table.add_column(
            name,
            justify="right" if (at if numbers is None else at in numbers) else "left",
            max_width=room,
            no_wrap=cropped or room is None,
            overflow="ellipsis" if cropped else "fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    (console if width <= console.width else Terminal(width=width)).print(table)


Item = TypeVar("Item")
SHOWN = 20  # documents left out that are named
DESCRIPTION = TextColumn("{task.description}", markup=False)


def progress_of_work() -> Progress:
    """Return a bar with the amount done, the total, the elapsed time and the time left, which stays."""
    return Progress(*_amounts(), console=Terminal(stderr=True))


def _amounts() -> tuple[ProgressColumn, ...]:
    return DESCRIPTION, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()


@contextmanager
def progress_of_parts(first: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a part of the work, the amount done, and the total (0 if unknown), on a terminal."""
    with _on_terminal(*_amounts()) as progress:
        bar = progress.add_task(first, total=None)
        yield lambda part, done, of: progress.update(bar, description=part, completed=done, total=of or None)


@contextmanager
def progress_of_bytes() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a download, the bytes done, and their total (0 if unknown); in a pipe by lines."""
    columns = (DESCRIPTION, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
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
    documents = count(1)
    with progress_of_parts(what) as show:
        yield lambda: show(what, next(documents), 0)


@contextmanager
def read_aloud(source: Source) -> Iterator[tuple[Iterator[Document], Embedded]]:
    """Open the documents of a source, with a callback for their embeddings; show both, and print what was left out."""
    columns = (SpinnerColumn(), DESCRIPTION, MofNCompleteColumn(), TimeElapsedColumn())
    with _on_terminal(*columns, TextColumn("{task.fields[rate]}")) as progress:
        reading = progress.add_task(f"indexing {source.name}", total=None, rate="")
        embedding = progress.add_task("embedding chunks", total=None, visible=False, rate="")
        tell = _teller(progress)

        def show_embedded(done: int, fresh: int) -> None:
            if not progress.tasks[embedding].visible:
                progress.reset(embedding, visible=True)
            rate = fresh / max(progress.tasks[embedding].elapsed or 0.0, 1e-3)
            progress.update(embedding, completed=done, rate=f"{rate:.0f}/s")
            tell(f"embedding chunks of {source.name}: {done:,} done, {rate:.0f}/s")

        def read() -> Iterator[Document]:
            for number, document in enumerate(source.documents(), start=1):
                yield document
                progress.advance(reading)
                tell(f"indexing {source.name}: {number:,} documents")

        yield read(), show_embedded
    if source.problems:
        say(f"{len(source.problems)} left out of {source.name}:")
    for problem in source.problems[:SHOWN]:
        say(f"left out: {problem}")
    if len(source.problems) > SHOWN:
        say(f"and {len(source.problems) - SHOWN} more")
    for line in source.reading.lines()[: 2 * SHOWN]:
        say(line)


def track_items(items: Iterable[Item], doing: str, count: int) -> Iterable[Item]:
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


def _on_terminal(*columns: ProgressColumn) -> Progress:
    console = Terminal(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class Pacing:
    """Decides when another line is due in a pipe: every 10 s or every 10 % of the work, but not twice in a second."""

    EVERY_S, EVERY_SHARE, LEAST_S = 10.0, 0.1, 1.0

    def __init__(self, now: float) -> None:
        self._last, self._share = now, 0.0

    def due(self, now: float, share: float) -> bool:
        """Return True if a line is due, with this share of the work done; then count it as written."""
        passed = now - self._last
        if passed < self.LEAST_S or (passed < self.EVERY_S and share - self._share < self.EVERY_SHARE):
            return False
        self._last, self._share = now, share
        return True


OF = "{task.completed:,.0f} of {task.total:,.0f}"
WINDOW_S = 600.0  # seconds by whose speed the time left is told
Clock = Callable[[], float]


class Board(AbstractContextManager[Any]):
    """A line about work until it ends, even by an error: beside a bar on a terminal, now and then in a pipe; the last
    line stays. Nothing is shown before `begin`, so that work that is refused shows nothing. `count`: template of a
    `TextColumn`. `hidden`: show nothing, as in processes of a training run except the first."""

    def __init__(
        self,
        title: str,
        count: str,
        console: Console | None = None,
        clock: Clock = time.monotonic,
        hidden: bool = False,
    ) -> None:
        self._console, self._clock, self._hidden = console or Terminal(stderr=True), clock, hidden
        self._title, self._count = title, TextColumn(count)
        said = TextColumn("{task.fields[said]}", markup=False)
        self._bar = Progress(
            *(DESCRIPTION, BarColumn(20), self._count, TimeRemainingColumn(), said),
            console=self._console,
            get_time=clock,
            speed_estimate_period=WINDOW_S,
            transient=True,
            redirect_stdout=False,
        )
        self._task = self._bar.add_task(title, start=False, said="")
        self._pacing: Pacing | None = None
        self._said = self._doing = ""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def parts(self) -> Sequence[str]:
        """Return what is said besides the amount done and the time left."""

    def begin(self, done: int, total: int) -> None:
        """Show the amount done before; only the first call counts."""
        if self._pacing is not None:
            return
        self._pacing = Pacing(self._clock())
        self._bar.reset(self._task, completed=done, total=total)
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._hidden:
            self._bar.start()

    def advance(self, done: int | None = None) -> None:
        """Count one more, or set the total done."""
        self._bar.update(self._task, completed=self._bar.tasks[0].completed + 1 if done is None else done)
        self.doing("")

    def doing(self, what: str) -> None:
        """Show what is at work until the next advance."""
        self._doing = what
        self._bar.update(self._task, said="; ".join(filter(None, (what, *self.parts()))))
        share = self._bar.tasks[0].percentage / 100.0
        if not self._bar.live.is_started and self._pacing is not None and self._pacing.due(self._clock(), share):
            self._say_line()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if not self._hidden:
            self._console.print(Text(line), soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()
        if self._pacing is not None and (kind is None or self._bar.tasks[0].completed):
            self._say_line()

    def _say_line(self) -> None:
        """Print the amount done, the speed, the time left and the rest, unless that was the last line."""
        task = self._bar.tasks[0]
        speed = 60 * (task.speed or 0.0)
        pace = f"{speed:{',.0f' if speed >= 100 else '.3g'}} per minute" if speed else ""
        left = f"{timedelta(seconds=task.time_remaining)} left" if task.time_remaining else ""
        line = "; ".join(filter(None, (str(self._count.render(task)), pace, left, self._doing, *self.parts())))
        if line != self._said:
            self._said = line
            self.say(f"{self._title}: {line}")
