"""The learning rate of every step."""

from __future__ import annotations

import math

from harness1.config import Train


def rate_at(step: int, steps: int, train: Train) -> float:
    """The rate of step `step` (from 0) of `steps`: a linear rise to `train.rate` over the warm-up, then constant, or
    linearly or along a cosine towards 0, which the step after the last would have."""
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
    """Whether what is done every so many steps is done after this one; `every` 0: never."""
    return every > 0 and step % every == 0
