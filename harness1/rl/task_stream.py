"""Choose the tasks of a training run and of its validation, and assign them to groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from harness1.config import Config
from harness1.data.source import Source
from harness1.episodes.jobs import EpisodeJob
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.records import Record, Task
from harness1.reward.outcome import targets
from harness1.sft.collect import check_taught_split

DEV = "dev"
"""The split for validation, if a dataset has it."""


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


def in_turn(each: Sequence[Sequence[PlacedTask]], limit: int) -> list[PlacedTask]:
    """Take the first `limit` tasks of several datasets, one from each in turn."""
    longest = max(map(len, each), default=0)
    return [tasks[at] for at in range(longest) for tasks in each if at < len(tasks)][:limit]


class TaskChoice(NamedTuple):
    """The tasks to learn from, and the held-out tasks; no task is in both."""

    tasks: list[PlacedTask]
    held_out: list[PlacedTask]


def choose_tasks(
    sources: Sequence[Source], split: str, admitted: Sequence[frozenset[str] | None], config: Config
) -> TaskChoice:
    """Choose all tasks of a split of each dataset, and `train.watch.tasks` held-out ones, from each dataset in turn:
    from its split `dev`, or drawn from the tasks by `rl.seed` if there is no `dev` or it is the split to learn from.

    Args:
        admitted: for each dataset, the ids of the tasks that may be learned from; None means all.

    Raises:
        UsageError: the split is missing, empty or reserved for testing; or a task lacks its gold.
    """
    learned: list[PlacedTask] = []
    validation: list[list[PlacedTask]] = []
    wanted = config.train.watch.tasks
    for setup, (source, ids) in enumerate(zip(sources, admitted, strict=True)):
        check_taught_split(split, source.name)
        tasks = source.tasks(split)
        if DEV in source.splits and split != DEV:
            held_out = source.tasks(DEV)[:wanted]
        else:
            share = min(wanted // len(sources) + 1 if wanted else 0, len(tasks) // 2)
            drawn = set(Random(f"{config.rl.seed}/held out").sample(range(len(tasks)), share))
            held_out = [task for at, task in enumerate(tasks) if at in drawn]
            tasks = [task for at, task in enumerate(tasks) if at not in drawn]
        tasks = [task for task in tasks if ids is None or task.task_id in ids]
        if not tasks:
            raise UsageError(f"{source.name} has no tasks in split {split}" + " that were admitted" * (ids is not None))
        for task in (*tasks, *held_out):
            targets(task.task_id, task.gold, config.index.unit)
        learned += [PlacedTask(task, setup) for task in tasks]
        validation.append([PlacedTask(task, setup) for task in held_out])
    return TaskChoice(learned, in_turn(validation, wanted))
