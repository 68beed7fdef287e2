"""Show an evaluation or a training run in progress: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from harness1.cli.printing import say_torn
from harness1.cli.progress import EpisodeProgress, Pace, Pacing, StepProgress
from harness1.cli.terminal import Terminal
from harness1.episodes.jobs import Depths
from harness1.eval.evaluate import Evaluation, ensure_run, evaluate
from harness1.records import Episode, Gold
from harness1.training.log import validation_values
from harness1.viewer.report import ensure_report

REFRESHES = 4
"""Drawings per second."""
ECHO = 4
"""Columns left free beside the panel. A terminal writes `^C` behind it; in its last columns, that would break the line
and leave the panel's upper edge behind."""
OF = "{task.completed:,.0f} of {task.total:,.0f}"
EDGES = 6
"""Columns of a panel's upper edge beside its title."""
Clock = Callable[[], float]


class Speed(ProgressColumn):
    """Shows the amount done per minute; nothing while it is unknown."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(Column(no_wrap=True))
        self._pace = pace

    def render(self, task: Task) -> Text:
        minute = 60.0 * (self._pace.per_second() or 0.0)
        return Text(f"{minute:{',.0f' if minute >= 100 else '.3g'}} per minute" if minute else "")


class TimeLeft(ProgressColumn):
    """Shows the time left; nothing if there is none or it is unknown."""

    max_refresh = 0.5  # a figure that changes at each drawing cannot be read

    def __init__(self, pace: Pace) -> None:
        super().__init__(Column(no_wrap=True))
        self._pace = pace

    def render(self, task: Task) -> Text:
        speed = self._pace.per_second()
        return Text(f"{timedelta(seconds=round(task.remaining / speed))} left" if speed and task.remaining else "")


class View(NamedTuple):
    """The content shown besides the amount done: rows of a label and a text, and parts of a line, if not empty."""

    rows: Sequence[tuple[str, str]]
    line: Sequence[str]


class Board(AbstractContextManager[Any]):
    """Shows views until the work ends, even by an error: the cursor is restored, and the last line stays.

    Nothing is shown before `begin`, so that work that is refused shows no panel. Standard output is left alone.

    Args:
        count: the text for the amount done, as a template of `rich.progress.TextColumn`.
        console: the output; standard error by default.
        hidden: show nothing, as in all processes of a training run except the first.
    """

    def __init__(
        self, title: str, count: str, console: Console | None, clock: Clock = time.monotonic, hidden: bool = False
    ) -> None:
        self._console = console or Terminal(stderr=True)
        self._lock = threading.RLock()
        self._title, self._clock, self._hidden = title, clock, hidden
        self._pace = Pace()
        self._columns = (TextColumn(count), Speed(self._pace), TimeLeft(self._pace))
        bar = BarColumn(None), *self._columns
        self._bar = Progress(*bar, console=self._console, get_time=clock, expand=True)
        self._task = self._bar.add_task("", start=False)
        self._live: Live | None = None
        self._pacing: Pacing | None = None
        self._said = self._doing = ""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def view(self) -> View:
        """Return the present view. It is called within the lock, possibly on another thread."""

    def begin(self, done: int, total: int) -> None:
        """Show the first view, with the amount done before; called once."""
        if self._bar.tasks[0].started:
            return
        self._bar.reset(self._task, completed=done, total=total)
        if self._hidden:
            return
        self._pacing = Pacing(self._clock())
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                self, console=self._console, refresh_per_second=REFRESHES, transient=True, redirect_stdout=False
            )
            self._live.start()

    def advance(self, done: int | None = None) -> None:
        """Count one more, or set the total done; a terminal shows it at its next drawing."""
        before = int(self._bar.tasks[0].completed)
        done = before + 1 if done is None else done
        self._pace.advance(self._clock(), max(0, done - before))
        self._bar.update(self._task, completed=done)
        self._doing = ""
        self._say_if_due()

    def doing(self, what: str) -> None:
        """Show what is at work until the next advance."""
        self._doing = what
        self._say_if_due()

    def _say_if_due(self) -> None:
        share = self._bar.tasks[0].percentage / 100.0
        if self._live is None and self._pacing is not None and self._pacing.due(self._clock(), share):
            self._say()

    def say(self, line: str) -> None:
        """Print a line that stays, above the panel."""
        if not self._hidden:
            self._console.print(Text(line), soft_wrap=True)

    def __rich__(self) -> Panel:
        with self._lock:
            view = self.view()
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(overflow="fold")
        for label, text in (("now", self._doing), *view.rows):
            if text:
                rows.add_row(label, Text(text))
        width = max(EDGES, self._console.width - ECHO)
        title = Text(self._title)
        title.truncate(width - EDGES)  # by no ellipsis, a character that not every terminal knows
        return Panel(Group(self._bar.get_renderable(), rows), title=title, title_align="left", width=width)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._pacing is not None and (kind is None or self._bar.tasks[0].completed):
            self._say()

    def _say(self) -> None:
        """Print the amount done, the view and the time left in one line, unless it equals the last line."""
        with self._lock:
            view = self.view()
        shown = (str(column.render(self._bar.tasks[0])) for column in self._columns)
        line = "; ".join(part for part in (*shown, self._doing, *view.line) if part)
        if line != self._said:
            self._said = line
            self.say(f"{self._title}: {line}")


Words = Mapping[str, str]
"""Names of values, each with its word in the row."""
BUFFER: Words = MappingProxyType({"groups/waiting": "waiting", "staleness": "staleness", "staleness_max": "at most"})
DROPPED: Words = MappingProxyType({"groups/filtered": "filtered", "groups/stale": "too old", "groups/faulty": "broken"})
FAILURES: Words = MappingProxyType(
    {"format_failures": "format", "tool_errors": "tools", "zero_variance": "groups without a difference"}
)
SECONDS: Words = MappingProxyType({"seconds": "in all", "wait_seconds": "waiting", "train_seconds": "training"})


class EvaluationBoard(Board):
    """Listens to `evaluate`: `begin`, `earlier`, `episode` and `queues`.

    Args:
        golds: the gold of all tasks, by their ids.
    """

    def __init__(
        self,
        title: str,
        golds: Mapping[str, Gold | None],
        console: Console | None = None,
        clock: Clock = time.monotonic,
        hidden: bool = False,
    ) -> None:
        super().__init__(title, f"{OF} episodes", console, clock, hidden)
        self._golds = golds
        self._progress = EpisodeProgress()
        self._depths: Depths = dict

    def earlier(self, episode: Episode) -> None:
        """Take an episode of an earlier session."""
        with self._lock:
            self._progress.add(episode, self._golds[episode.task.task_id])

    def episode(self, episode: Episode) -> None:
        """Take an episode that has just finished."""
        self.earlier(episode)
        self.advance()

    def queues(self, depths: Depths) -> None:
        """Take the function that gives the depths of queues (see `run_episodes`)."""
        self._depths = depths

    def view(self) -> View:
        """Return the recall so far, the mean cost of an episode, and the ends of episodes by kind."""
        done = self._progress
        recall = "" if (interval := done.recall.interval()) is None else _interval(interval)
        failures = _counted(dict(done.failures.most_common()))
        rows = (
            ("recall", recall and f"{recall}, curated, over {done.recall.tasks} tasks"),
            ("an episode", _episode(*done.means())),
            ("queues", _counted(self._depths())),
            ("ended by", _counted(dict(done.stops.most_common()))),
            ("failures", failures or "none"),
        )
        return View(rows, (recall and f"recall {recall}", failures))


class TrainingBoard(Board):
    """Listens to a training run: `listen` is the `on_step` of a trainer.

    Args:
        unit: the unit that the trainer counts: `step` or `batch`.
        names: the names of the values to show, the most interesting first.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        names: Sequence[str],
        console: Console | None = None,
        clock: Clock = time.monotonic,
        hidden: bool = False,
    ) -> None:
        super().__init__(title, f"{unit} {OF}", console, clock, hidden)
        self._progress = StepProgress()
        self._unit, self._names = unit, names

    def listen(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; print those of a validation in a line that stays."""
        with self._lock:
            self._progress.add(step, values)
        self.begin(step, steps)
        if found := validation_values(values):
            self.say(f"{self._unit} {step}, held out: {named(found, self._names)}")
        self.advance(step)

    def view(self) -> View:
        """Return the values of the last steps and of the last validation."""
        done, values, speed = self._progress, self._progress.values, self._progress.tokens_per_second()
        validation = named(done.validation, self._names)
        rows = (
            ("values", _with_trends(done, self._names)),
            ("speed", "" if speed is None else f"{speed:,.0f} tokens/s"),
            ("seconds", _worded(values, SECONDS, "{:.1f}")),
            ("buffer", _worded(values, BUFFER, "{:.3g}")),
            ("dropped", _worded(values, DROPPED, "{:.0f}")),
            ("failures", _worded(values, FAILURES, "{:.1%}")),
            ("held out", validation and f"{validation} ({self._unit} {done.validation_step})"),
        )
        return View(rows, (named(values, self._names),))


def evaluated(evaluation: Evaluation, out: Path, force: bool = False) -> Mapping[str, Any]:
    """Complete a run folder under a dashboard, and write its report; return its metrics.

    Args:
        force: begin again, even if the folder holds an earlier run.
    """
    metrics = ensure_run(evaluation, out, _under_dashboard, force=force)
    ensure_report(out, evaluation.tasks)
    return metrics


def _under_dashboard(evaluation: Evaluation, out: Path) -> Mapping[str, Any]:
    golds = {task.task_id: task.gold for task in evaluation.tasks}
    with EvaluationBoard(f"{evaluation.policy} on {evaluation.dataset} ({out.name})", golds) as board:
        told = board.begin, board.episode, partial(say_torn, out), board.queues, board.earlier
        return evaluate(evaluation, out, *told)


def named(values: Mapping[str, float], names: Sequence[str]) -> str:
    """Return the named values that exist, with their names, in this order."""
    return _worded(values, {name: name for name in names}, "{:.3g}")


def _worded(values: Mapping[str, float], words: Words, form: str) -> str:
    return ", ".join(f"{word} {form.format(values[name])}" for name, word in words.items() if name in values)


def _with_trends(progress: StepProgress, names: Sequence[str]) -> str:
    parts = []
    for name in (name for name in names if name in progress.values):
        trend = progress.trend(name)
        parts.append(f"{name} {progress.values[name]:.3g}" + ("" if trend is None else f" ({trend:+.2g})"))
    return ", ".join(parts)


def _interval(interval: tuple[float, float, float]) -> str:
    mean, low, high = interval
    return f"{mean:.3f} ({max(0.0, low):.3f} to {min(1.0, high):.3f})"


def _episode(turns: float, prompt_tokens: float, output_tokens: float) -> str:
    read = f", {prompt_tokens:,.0f} tokens read" if prompt_tokens else ""
    written = f", {output_tokens:,.0f} written" if output_tokens else ""
    return f"{turns:.1f} turns{read}{written}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
