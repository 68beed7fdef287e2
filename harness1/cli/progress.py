"""Work under way as plain numbers: rates, means so far, failures, and the time that is left. The clock is passed in."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import fmean

from harness1.records import Episode, Gold, Record, Status
from harness1.reward.outcome import outcome
from harness1.train.log import validation_values

WINDOW_S = 60.0
"""Seconds behind a moving rate."""
NORMAL_95 = 1.959964
"""Standard deviations on either side of the middle 95 % of a normal distribution."""


class Rate:
    """A moving rate of what comes in bursts: what came within the window, or since the beginning where that is nearer.

    Args:
        now: when it begins, in seconds.
    """

    def __init__(self, now: float, window_s: float = WINDOW_S) -> None:
        self._began, self._window_s, self._total = now, window_s, 0.0
        self._came: deque[tuple[float, float]] = deque()
        self._within = 0.0

    def add(self, now: float, amount: float = 1.0) -> None:
        """So much came at this moment."""
        self._came.append((now, amount))
        self._total += amount
        self._within += amount
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Of the window; of all the time where nothing came within it, and 0 where nothing came ever. The first second
        counts whole: a burst at the very beginning is no measure."""
        self._forget(now)
        since = min(now - self._began, self._window_s) if self._came else now - self._began
        return (self._within if self._came else self._total) / max(since, 1.0)

    def _forget(self, now: float) -> None:
        while self._came and self._came[0][0] <= now - self._window_s:
            self._within -= self._came.popleft()[1]


class RunningMean:
    """The mean over tasks of the means over their samples, as they come, with its 95 % interval by the normal
    approximation. Adding costs the same however many there are."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[int, float]] = {}
        self._sum = self._squares = 0.0

    @property
    def tasks(self) -> int:
        return len(self._tasks)

    def add(self, task_id: str, value: float) -> None:
        """Another sample of a task."""
        count, before = self._tasks.get(task_id, (0, 0.0))
        after = before + (value - before) / (count + 1)
        self._tasks[task_id] = count + 1, after
        self._sum += after - before
        self._squares += after**2 - before**2

    def interval(self) -> tuple[float, float, float] | None:
        """Mean, lower and upper bound, all three equal for one task; None for none. Bounds are not cut to [0, 1]."""
        if not self._tasks:
            return None
        count = len(self._tasks)
        mean = self._sum / count
        variance = max(0.0, self._squares - count * mean**2) / (count - 1) if count > 1 else 0.0
        half = NORMAL_95 * math.sqrt(variance / count)
        return mean, mean - half, mean + half


class Pacing:
    """When another line is due where lines cannot be taken back: each 10 s or each 10 % of the work, whichever is
    sooner, but not twice within a second."""

    EVERY_S, EVERY_SHARE, LEAST_S = 10.0, 0.1, 1.0

    def __init__(self, now: float) -> None:
        self._last, self._share = now, 0.0

    def due(self, now: float, share: float) -> bool:
        """Whether a line is due now, with this share of the work done; if so, it counts as written."""
        passed = now - self._last
        if passed < self.LEAST_S or (passed < self.EVERY_S and share - self._share < self.EVERY_SHARE):
            return False
        self._last, self._share = now, share
        return True


class EpisodeNumbers(Record, kw_only=True):
    """An evaluation under way. Means are over the episodes that the infrastructure did not break, those of earlier
    sessions among them; the rate is that of this session."""

    done: int
    total: int
    per_minute: float
    seconds_left: float | None
    """None while there is nothing to reckon with."""
    recall: tuple[float, float, float] | None = None
    """The mean curated recall, and its interval."""
    tasks: int = 0
    """Behind it."""
    turns: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    """Both for one episode."""
    failures: dict[str, int] = {}
    """Episodes by a status that is not `completed`; `format errors` and `tool errors` count single turns."""
    stops: dict[str, int] = {}
    """Why episodes ended, the most frequent first."""


class EpisodeProgress:
    """Counts episodes.

    Args:
        done, total: what there is from earlier sessions, and what there is to be.
    """

    def __init__(self, now: float, done: int, total: int) -> None:
        self._done, self._total, self._rate = done, total, Rate(now)
        self._recall = RunningMean()
        self._whole = self._turns = self._prompt_tokens = self._output_tokens = 0
        self._failures: Counter[str] = Counter()
        self._stops: Counter[str] = Counter()

    def add(self, episode: Episode, gold: Gold | None, now: float) -> None:
        """Another episode has finished.

        Raises:
            UsageError: the gold names nothing to find.
        """
        self._done += 1
        self._rate.add(now)
        self.include(episode, gold)

    def include(self, episode: Episode, gold: Gold | None) -> None:
        """An episode of an earlier session, which is among the `done` and says nothing about the rate.

        Raises:
            UsageError: the gold names nothing to find.
        """
        self._stops[episode.stop_reason.value] += 1
        if episode.status is not Status.COMPLETED:
            self._failures[episode.status.value] += 1
        if episode.status is Status.INFRA_ERROR:
            return
        self._whole += 1
        self._turns += sum(turn.action is not None for turn in episode.turns)
        self._prompt_tokens += sum(turn.prompt_tokens for turn in episode.turns)
        self._output_tokens += sum(len(call.output_ids) for turn in episode.turns for call in turn.calls)
        if gold is not None:
            result = outcome(episode, gold)
            self._recall.add(episode.task.task_id, result.recall)
            self._failures["format errors"] += result.format_errors
            self._failures["tool errors"] += result.tool_errors

    def numbers(self, now: float) -> EpisodeNumbers:
        """What is known at this moment."""
        per_second, whole = self._rate.per_second(now), max(1, self._whole)
        return EpisodeNumbers(
            done=self._done,
            total=self._total,
            per_minute=60.0 * per_second,
            seconds_left=(self._total - self._done) / per_second if per_second else None,
            recall=self._recall.interval(),
            tasks=self._recall.tasks,
            turns=self._turns / whole,
            prompt_tokens=self._prompt_tokens / whole,
            output_tokens=self._output_tokens / whole,
            failures={name: count for name, count in self._failures.most_common() if count},
            stops=dict(self._stops.most_common()),
        )


RECENT = 5
"""Steps behind a recent mean, which is compared with that of as many before."""


class StepNumbers(Record, kw_only=True):
    """A training under way."""

    step: int
    steps: int
    seconds_left: float | None
    values: dict[str, float] = {}
    """As the last step measured them."""
    trends: dict[str, float] = {}
    """The mean of a value over the last steps minus that over as many before them."""
    tokens_per_second: float | None = None
    """Over the last steps, without what lies between them."""
    validation: dict[str, float] = {}
    """What the last look at held-out rows or tasks measured, and
    look_step: after which step that was."""
    validation_step: int = 0


class StepProgress:
    """Counts steps. The first one that it is told of is the one that training begins behind."""

    def __init__(self) -> None:
        self._step = self._steps = self._validation_step = 0
        self._times: deque[tuple[float, int]] = deque(maxlen=2 * RECENT + 1)
        self._values: deque[Mapping[str, float]] = deque(maxlen=2 * RECENT)
        self._validation: dict[str, float] = {}

    def add(self, step: int, steps: int, values: Mapping[str, float], now: float) -> None:
        """What a `StepListener` is told. A look takes time and is no step, so it counts for the time that is left."""
        self._step, self._steps = step, steps
        if found := validation_values(values):
            self._validation, self._validation_step = found, step
        elif values:
            self._values.append(values)
        if not self._times or step > self._times[-1][1]:
            self._times.append((now, step))

    def numbers(self) -> StepNumbers:
        """What is known since the last step."""
        recent = list(self._values)
        last = dict(recent[-1]) if recent else {}
        timed = [each for each in recent if each.get("seconds") and "tokens" in each]
        seconds = sum(each["seconds"] for each in timed)
        return StepNumbers(
            step=self._step,
            steps=self._steps,
            seconds_left=self._seconds_left(),
            values=last,
            trends={name: trend for name in last if (trend := _trend(recent, name)) is not None},
            tokens_per_second=sum(each["tokens"] for each in timed) / seconds if seconds else None,
            validation=self._validation,
            validation_step=self._validation_step,
        )

    def _seconds_left(self) -> float | None:
        if len(self._times) < 2:
            return None
        (begun, first), (ended, last) = self._times[0], self._times[-1]
        return (self._steps - self._step) * (ended - begun) / (last - first)


def _trend(recent: Sequence[Mapping[str, float]], name: str) -> float | None:
    known = [each[name] for each in recent if name in each]
    if len(known) < 2 * RECENT:
        return None
    return fmean(known[RECENT:]) - fmean(known[:RECENT])
