"""Work under way as plain numbers: means so far, failures and trends, and when a line about them is due."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import fmean

from harness1.records import Episode, Gold, Record, Status
from harness1.reward.outcome import outcome
from harness1.train.log import validation_values

NORMAL_95 = 1.959964
"""Standard deviations on either side of the middle 95 % of a normal distribution."""


class RunningMean:
    """The mean over tasks of the means over their samples, with its 95 % interval by the normal approximation. A sample
    is added in constant time."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[int, float]] = {}
        self._sum = self._squares = 0.0

    @property
    def tasks(self) -> int:
        return len(self._tasks)

    def add(self, task_id: str, value: float) -> None:
        """Add a sample of a task."""
        count, before = self._tasks.get(task_id, (0, 0.0))
        after = before + (value - before) / (count + 1)
        self._tasks[task_id] = count + 1, after
        self._sum += after - before
        self._squares += after**2 - before**2

    def interval(self) -> tuple[float, float, float] | None:
        """Return mean, lower and upper bound, equal for one task; None for no task. Bounds are not cut to [0, 1]."""
        if not self._tasks:
            return None
        count = len(self._tasks)
        mean = self._sum / count
        variance = max(0.0, self._squares - count * mean**2) / (count - 1) if count > 1 else 0.0
        half = NORMAL_95 * math.sqrt(variance / count)
        return mean, mean - half, mean + half


class Pacing:
    """Decides when another line is due where lines cannot be taken back: every 10 s or every 10 % of the work,
    whichever is sooner, but not twice within a second."""

    EVERY_S, EVERY_SHARE, LEAST_S = 10.0, 0.1, 1.0

    def __init__(self, now: float) -> None:
        self._last, self._share = now, 0.0

    def due(self, now: float, share: float) -> bool:
        """Return whether a line is due, with this share of the work done; if so, count it as written."""
        passed = now - self._last
        if passed < self.LEAST_S or (passed < self.EVERY_S and share - self._share < self.EVERY_SHARE):
            return False
        self._last, self._share = now, share
        return True


class EpisodeNumbers(Record, kw_only=True):
    """An evaluation under way. Means are over the episodes that the infrastructure did not break."""

    recall: tuple[float, float, float] | None = None
    """The mean curated recall, and its interval."""
    tasks: int = 0
    """Tasks behind the recall."""
    turns: float = 0.0
    """Per episode, as are the two below."""
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    failures: dict[str, int] = {}
    """Episodes by a status that is not `completed`; `format errors` and `tool errors` count single turns."""
    stops: dict[str, int] = {}
    """Why episodes ended, the most frequent first."""


class EpisodeProgress:
    """Counts episodes, those of earlier sessions among them."""

    def __init__(self) -> None:
        self._recall = RunningMean()
        self._whole = self._turns = self._prompt_tokens = self._output_tokens = 0
        self._failures: Counter[str] = Counter()
        self._stops: Counter[str] = Counter()

    def add(self, episode: Episode, gold: Gold | None) -> None:
        """Count a finished episode.

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

    def numbers(self) -> EpisodeNumbers:
        """Return what is known at this moment."""
        whole = max(1, self._whole)
        return EpisodeNumbers(
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

    values: dict[str, float] = {}
    """As the last step measured them."""
    trends: dict[str, float] = {}
    """The mean of a value over the last steps minus that over as many before them."""
    tokens_per_second: float | None = None
    """Over the last steps, without what lies between them."""
    validation: dict[str, float] = {}
    """What the last validation measured."""
    validation_step: int = 0
    """The step after which it was."""


class StepProgress:
    """Keeps what the last steps and the last validation measured."""

    def __init__(self) -> None:
        self._values: deque[Mapping[str, float]] = deque(maxlen=2 * RECENT)
        self._validation: dict[str, float] = {}
        self._validation_step = 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Keep what a step measured, or a validation after it."""
        if found := validation_values(values):
            self._validation, self._validation_step = found, step
        elif values:
            self._values.append(values)

    def numbers(self) -> StepNumbers:
        """Return what is known since the last step."""
        recent = list(self._values)
        last = dict(recent[-1]) if recent else {}
        timed = [each for each in recent if each.get("seconds") and "tokens" in each]
        seconds = sum(each["seconds"] for each in timed)
        return StepNumbers(
            values=last,
            trends={name: trend for name in last if (trend := _trend(recent, name)) is not None},
            tokens_per_second=sum(each["tokens"] for each in timed) / seconds if seconds else None,
            validation=self._validation,
            validation_step=self._validation_step,
        )


def _trend(recent: Sequence[Mapping[str, float]], name: str) -> float | None:
    known = [each[name] for each in recent if name in each]
    if len(known) < 2 * RECENT:
        return None
    return fmean(known[RECENT:]) - fmean(known[:RECENT])
