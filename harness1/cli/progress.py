"""Work in progress as plain numbers: means so far, failures and trends, and the times to print them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from statistics import fmean

import numpy as np

from harness1.records import Episode, Gold, Status
from harness1.reward.measures import measure_outcome
from harness1.training.log import validation_values

NORMAL_95 = 1.959964
"""Standard deviations on either side of the middle 95 % of a normal distribution."""


class RunningMean:
    """The mean over tasks of the means over their samples, with its 95 % interval by the normal approximation."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[int, float]] = {}

    @property
    def tasks(self) -> int:
        return len(self._tasks)

    def add(self, task_id: str, value: float) -> None:
        """Add a sample of a task."""
        count, before = self._tasks.get(task_id, (0, 0.0))
        self._tasks[task_id] = count + 1, before + (value - before) / (count + 1)

    def interval(self) -> tuple[float, float, float] | None:
        """Return mean, lower and upper bound, equal for one task; None for no task. Bounds are not cut to [0, 1]."""
        if not self._tasks:
            return None
        means = [mean for _, mean in self._tasks.values()]
        mean, count = fmean(means), len(means)
        half = NORMAL_95 * float(np.std(means, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
        return mean, mean - half, mean + half


class Pacing:
    """Decides when another line is due on an output that keeps all lines: every 10 s or every 10 % of the work,
    whichever is sooner, but not twice within a second."""

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


class Pace:
    """Estimates speed and time left from the later half of what was done: the first items wait for what is loaded and
    compiled once. Nothing is estimated before the fifth item, or before 30 s have passed since the first; nor while
    that half took less than a second, because episodes that are played at once also end at once."""

    LEAST, LEAST_S, SHORTEST_S = 5, 30.0, 1.0

    def __init__(self) -> None:
        self._ends: list[float] = []

    def advance(self, now: float, items: int) -> None:
        """Count items that were done at a time in seconds."""
        self._ends += [now] * items

    def per_second(self) -> float | None:
        """Return the items per second; None while there is nothing to judge by."""
        ends = self._ends
        if len(ends) < 2 or (len(ends) < self.LEAST and ends[-1] - ends[0] < self.LEAST_S):
            return None
        middle = (len(ends) - 1) // 2
        seconds = ends[-1] - ends[middle]
        return (len(ends) - 1 - middle) / seconds if seconds >= self.SHORTEST_S else None


class EpisodeProgress:
    """Counts the episodes of an evaluation in progress, including those of earlier sessions."""

    def __init__(self) -> None:
        self.recall = RunningMean()
        """Recall of the curated sets, over the episodes that the infrastructure did not break."""
        self.failures: Counter[str] = Counter()
        """Episodes by each status other than `completed`; `format errors` and `tool errors` count single turns."""
        self.stops: Counter[str] = Counter()
        """Episodes by the reason for their end."""
        self._whole = self._turns = self._prompt_tokens = self._output_tokens = 0

    def add(self, episode: Episode, gold: Gold | None) -> None:
        """Count a finished episode.

        Raises:
            UsageError: the gold is empty.
        """
        self.stops[episode.stop_reason.value] += 1
        if episode.status is not Status.COMPLETED:
            self.failures[episode.status.value] += 1
        if episode.status is Status.INFRA_ERROR:
            return
        self._whole += 1
        self._turns += sum(turn.action is not None for turn in episode.turns)
        self._prompt_tokens += sum(turn.prompt_tokens for turn in episode.turns)
        self._output_tokens += sum(len(call.output_ids) for turn in episode.turns for call in turn.calls)
        if gold is not None:
            result = measure_outcome(episode, gold)
            self.recall.add(episode.task.task_id, result.recall)
            self.failures += Counter({"format errors": result.format_errors, "tool errors": result.tool_errors})

    def means(self) -> tuple[float, float, float]:
        """Return the mean turns, prompt tokens and output tokens of episodes that the infrastructure did not break."""
        whole = max(1, self._whole)
        return self._turns / whole, self._prompt_tokens / whole, self._output_tokens / whole


RECENT = 5
"""Number of steps in a recent mean, which is compared with the mean of as many steps before."""


class StepProgress:
    """Keeps the values of the last steps of a training run and of its last validation."""

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, float]] = deque(maxlen=2 * RECENT)
        self.validation: dict[str, float] = {}
        self.validation_step = 0
        """The step of the last validation."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a step, or of a validation after it."""
        if found := validation_values(values):
            self.validation, self.validation_step = found, step
        elif values:
            self._recent.append(values)

    @property
    def values(self) -> Mapping[str, float]:
        """The values of the last step."""
        return self._recent[-1] if self._recent else {}

    def trend(self, name: str) -> float | None:
        """Return the mean of a value over the last steps minus that over as many before; None if there are fewer."""
        known = [each[name] for each in self._recent if name in each]
        return fmean(known[RECENT:]) - fmean(known[:RECENT]) if len(known) == 2 * RECENT else None

    def tokens_per_second(self) -> float | None:
        """Return the speed over the last steps, without the time between them; None if none was timed."""
        timed = [each for each in self._recent if each.get("seconds") and "tokens" in each]
        seconds = sum(each["seconds"] for each in timed)
        return sum(each["tokens"] for each in timed) / seconds if seconds else None
