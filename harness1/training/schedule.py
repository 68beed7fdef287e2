"""The learning rate schedule, and when a state is saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from harness1.config import Train


def rate_at(step: int, steps: int, train: Train) -> float:
    """Return the rate of step `step` (from 0) of `steps`: a linear rise to `train.rate` over the warm-up, then the same
    rate, or a linear or cosine decay that would reach 0 at the step after the last."""
    rising = round(train.warmup * steps)
    if step < rising:
        return train.rate * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    if train.schedule == "linear":
        return train.rate * max(0.0, 1 - done)
    if train.schedule == "cosine":
        return train.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.rate


def is_due(step: int, every: int) -> bool:
    """Return True after each `every`-th step; `every` 0 means never."""
    return every > 0 and step % every == 0


class SavePlan:
    """When a training run saves its state: every `train.save_every` steps, and `train.save_minutes` after the last."""

    def __init__(self, train: Train, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._seconds, self._clock = train.save_every, 60 * train.save_minutes, clock
        self._saved_at = clock()

    def is_due(self, step: int) -> bool:
        """Return True if the state is to be saved after this step."""
        late = 0 < self._seconds <= self._clock() - self._saved_at
        return late or is_due(step, self._every)

    def saved(self) -> None:
        """Begin to count the minutes anew."""
        self._saved_at = self._clock()
