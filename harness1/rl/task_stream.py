"""Assign the tasks of a training run to groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from harness1.episodes.jobs import EpisodeJob
from harness1.hashing import digest
from harness1.records import Record, Task


class PlacedTask(Record):
    """A task, and the position of the setup that it is played in."""

    task: Task
    setup: int = 0


class TaskStream:
    """An endless sequence of tasks, shuffled anew in each pass. The task at a position depends on the arguments alone,
    so that a resumed training finds its position by counting.

    Args:
        samples: the number of episodes in a group.
    """

    def __init__(self, tasks: Sequence[PlacedTask], samples: int, seed: int) -> None:
        self._tasks, self.samples, self._seed = tasks, samples, seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def task(self, index: int) -> PlacedTask:
        """Return the task of a group, by its number."""
        epoch, place = divmod(index, len(self._tasks))
        return self._tasks[self._order(epoch)[place]]

    def jobs(self, index: int) -> list[EpisodeJob]:
        """Return the jobs of a group, each with a number and a seed of its own in the whole training."""
        placed = self.task(index)
        return [
            EpisodeJob(
                task=placed.task,
                sample_idx=index * self.samples + sample,
                seed=int(digest([self._seed, index, sample])[:8], 16) >> 1,
                group_id=str(index),
                setup=placed.setup,
            )
            for sample in range(self.samples)
        ]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
