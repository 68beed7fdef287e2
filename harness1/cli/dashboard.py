"""What is shown of an evaluation and of a training while they are under way: a panel on a terminal, plain lines
elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType, TracebackType
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness1.cli.progress import EpisodeNumbers, EpisodeProgress, Pacing, StepNumbers, StepProgress
from harness1.episodes.jobs import Depths
from harness1.records import Episode, Gold
from harness1.train.log import StepListener, validation_values

REFRESHES = 4
"""Drawings per second."""
Clock = Callable[[], float]


class View(NamedTuple):
    """What there is to see: how much is done, rows of a label and a text, and all of it in one line."""

    done: int
    total: int
    rows: Sequence[tuple[str, str]]
    line: str


class Board(AbstractContextManager["Board"]):
    """Shows views until the work ends, however it ends: the cursor comes back, and the last line stays.

    Nothing is shown before `begin`, for what is refused needs no panel. Standard output is left alone.

    Args:
        view: makes what is shown now. It is called within the lock, maybe on a thread of its own.
        console: where; standard error by default.
        hidden: show nothing at all, as a process beside the one that leads.
    """

    def __init__(
        self,
        title: str,
        view: Callable[[], View],
        console: Console | None = None,
        clock: Clock = time.monotonic,
        hidden: bool = False,
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.lock = threading.RLock()
        self._title, self._view, self._clock, self._hidden = title, view, clock, hidden
        self._live: Live | None = None
        self._pacing: Pacing | None = None
        self._said = ""

    def begin(self) -> None:
        """Show the first view; once."""
        if self._pacing is not None or self._hidden:
            return
        self._pacing = Pacing(self._clock())
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                self, console=self.console, refresh_per_second=REFRESHES, transient=True, redirect_stdout=False
            )
            self._live.start()

    def changed(self) -> None:
        """There is something else to see: a terminal shows it at its next drawing."""
        if self._live is None and self._pacing is not None:
            with self.lock:
                view = self._view()
            if self._pacing.due(self._clock(), view.done / max(1, view.total)):
                self._say(view.line)

    def say(self, line: str) -> None:
        """A line that stays, above the panel."""
        if not self._hidden:
            self.console.print(Text(line), soft_wrap=True)

    def __rich__(self) -> Panel:
        with self.lock:
            view = self._view()
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(overflow="fold")
        for label, text in view.rows:
            rows.add_row(label, Text(text))
        bar = ProgressBar(total=max(1, view.total), completed=view.done)
        title = Text(self._title, overflow="crop")  # an ellipsis is a character that not every terminal knows
        return Panel(Group(Padding(bar), rows), title=title, title_align="left")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._pacing is not None:
            with self.lock:
                view = self._view()
            self._say(view.line)

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self.say(f"{self._title}: {line}")


Words = Mapping[str, str]
"""Names of values, each with the word for it in its row."""
BUFFER: Words = MappingProxyType({"groups/waiting": "waiting", "staleness": "staleness", "staleness_max": "at most"})
DROPPED: Words = MappingProxyType({"groups/filtered": "filtered", "groups/stale": "too old", "groups/faulty": "broken"})
FAILURES: Words = MappingProxyType(
    {"format_failures": "format", "tool_errors": "tools", "zero_variance": "groups without a difference"}
)
SECONDS: Words = MappingProxyType({"seconds": "in all", "wait_seconds": "waiting", "train_seconds": "training"})


class EvaluationBoard:
    """Takes the episodes of an evaluation."""

    def __init__(self, title: str, console: Console | None, clock: Clock, hidden: bool) -> None:
        self._clock = clock
        self._progress = EpisodeProgress(clock(), 0, 0)
        self._depths: Depths = dict
        self.board = Board(title, self._view, console, clock, hidden)

    def start(self, done: int, total: int) -> None:
        """So many episodes are there from earlier sessions, and so many there are to be."""
        with self.board.lock:
            self._progress = EpisodeProgress(self._clock(), done, total)
        self.board.begin()

    def earlier(self, episode: Episode, gold: Gold | None) -> None:
        """One of those from earlier sessions."""
        with self.board.lock:
            self._progress.include(episode, gold)

    def episode(self, episode: Episode, gold: Gold | None) -> None:
        """Another one has finished."""
        with self.board.lock:
            self._progress.add(episode, gold, self._clock())
        self.board.changed()

    def queues(self, depths: Depths) -> None:
        """Where the depths of queues are asked for (see `runner.run_episodes`)."""
        self._depths = depths

    def _view(self) -> View:
        numbers = self._progress.numbers(self._clock())
        return View(numbers.done, numbers.total, evaluation_rows(numbers, self._depths()), evaluation_line(numbers))


class TrainingBoard:
    """Listens to a training."""

    def __init__(self, title: str, console: Console | None, clock: Clock, hidden: bool) -> None:
        self._clock = clock
        self._progress = StepProgress()
        self._unit, self._names = "step", tuple[str, ...]()
        self.board = Board(title, self._view, console, clock, hidden)

    def listener(self, unit: str, names: Sequence[str]) -> StepListener:
        """What a trainer tells its steps to. What looks measure is said in lines that stay.

        Args:
            unit: what it counts: `step` or `batch`.
            names: of the values that are shown, those of most interest first.
        """
        self._unit, self._names = unit, tuple(names)

        def show(step: int, steps: int, values: Mapping[str, float]) -> None:
            with self.board.lock:
                self._progress.add(step, steps, values, self._clock())
            self.board.begin()
            if found := validation_values(values):
                self.board.say(f"{unit} {step}, held out: {named(found, names)}")
            self.board.changed()

        return show

    def _view(self) -> View:
        numbers = self._progress.numbers()
        rows = training_rows(numbers, self._unit, self._names)
        return View(numbers.step, numbers.steps, rows, training_line(numbers, self._unit, self._names))


@contextmanager
def dashboard_of_evaluation(
    title: str, *, console: Console | None = None, clock: Clock = time.monotonic, hidden: bool = False
) -> Iterator[EvaluationBoard]:
    """A board for `evaluate`: `board.start` is its `on_start`, `board.earlier` what its `on_earlier` tells,
    `board.queues` its `on_depths`.

    Args:
        console: where it is shown; standard error by default.
        hidden: show nothing.
    """
    shown = EvaluationBoard(title, console, clock, hidden)
    with shown.board:
        yield shown


@contextmanager
def dashboard_of_training(
    title: str, *, console: Console | None = None, clock: Clock = time.monotonic, hidden: bool = False
) -> Iterator[TrainingBoard]:
    """A board for a trainer: `board.listener` makes its `on_step`. Arguments are those of `dashboard_of_evaluation`."""
    shown = TrainingBoard(title, console, clock, hidden)
    with shown.board:
        yield shown


def evaluation_rows(numbers: EpisodeNumbers, depths: Mapping[str, int]) -> list[tuple[str, str]]:
    """Labels and texts of the panel of an evaluation."""
    rows = [("episodes", f"{_done(numbers.done, numbers.total)}, {_speed(numbers)}{_left(numbers.seconds_left)}")]
    if numbers.recall is not None:
        rows.append(("recall", f"{_interval(numbers.recall)}, curated, over {numbers.tasks} tasks"))
    rows.append(("an episode", _episode(numbers)))
    if depths:
        rows.append(("queues", _counted(depths)))
    if numbers.stops:
        rows.append(("ended by", _counted(numbers.stops)))
    rows.append(("failures", _counted(numbers.failures) or "none"))
    return rows


def evaluation_line(numbers: EpisodeNumbers) -> str:
    """The same in one line."""
    parts = [f"{_done(numbers.done, numbers.total)} episodes", _speed(numbers) + _left(numbers.seconds_left)]
    if numbers.recall is not None:
        parts.append(f"recall {_interval(numbers.recall)}")
    if numbers.failures:
        parts.append(_counted(numbers.failures))
    return "; ".join(parts)


def training_rows(numbers: StepNumbers, unit: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Labels and texts of the panel of a training."""
    values = numbers.values
    speed = "" if numbers.tokens_per_second is None else f", {numbers.tokens_per_second:,.0f} tokens/s"
    validation = named(numbers.validation, names)
    rows = [
        (unit, f"{_done(numbers.step, numbers.steps)}{speed}{_left(numbers.seconds_left)}"),
        ("values", _with_trends(numbers, names)),
        ("seconds", _worded(values, SECONDS, "{:.1f}")),
        ("buffer", _worded(values, BUFFER, "{:.3g}")),
        ("dropped", _worded(values, DROPPED, "{:.0f}")),
        ("failures", _worded(values, FAILURES, "{:.1%}")),
        ("held out", validation and f"{validation} ({unit} {numbers.validation_step})"),
    ]
    return [(label, text) for label, text in rows if text]


def training_line(numbers: StepNumbers, unit: str, names: Sequence[str]) -> str:
    """The same in one line."""
    said = named(numbers.values, names)
    return f"{unit} {_done(numbers.step, numbers.steps)}{_left(numbers.seconds_left)}" + (f"; {said}" if said else "")


def named(values: Mapping[str, float], names: Sequence[str]) -> str:
    """Those of the values that there are, with their names, in the order of these."""
    return _worded(values, {name: name for name in names}, "{:.3g}")


def _worded(values: Mapping[str, float], words: Words, form: str) -> str:
    return ", ".join(f"{word} {form.format(values[name])}" for name, word in words.items() if name in values)


def _with_trends(numbers: StepNumbers, names: Sequence[str]) -> str:
    parts = []
    for name in (name for name in names if name in numbers.values):
        trend = f" ({numbers.trends[name]:+.2g})" if name in numbers.trends else ""
        parts.append(f"{name} {numbers.values[name]:.3g}{trend}")
    return ", ".join(parts)


def _done(done: int, total: int) -> str:
    return f"{done:,} of {total:,}"


def _speed(numbers: EpisodeNumbers) -> str:
    return f"{numbers.per_minute:{',.0f' if numbers.per_minute >= 100 else '.3g'}} per minute"


def _left(seconds: float | None) -> str:
    """The time that is left, behind a comma; nothing where there is none or it is not known."""
    if not seconds:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f", {hours}:{minutes:02}:{rest:02} left"


def _interval(interval: tuple[float, float, float]) -> str:
    mean, low, high = interval
    return f"{mean:.3f} ({max(0.0, low):.3f} to {min(1.0, high):.3f})"


def _episode(numbers: EpisodeNumbers) -> str:
    tokens = f", {numbers.prompt_tokens:,.0f} tokens read" if numbers.prompt_tokens else ""
    written = f", {numbers.output_tokens:,.0f} written" if numbers.output_tokens else ""
    return f"{numbers.turns:.1f} turns{tokens}{written}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
