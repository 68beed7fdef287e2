"""Which tasks of some datasets are learned from, and which are held out to watch."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from harness1.config import Config
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.records import Task
from harness1.reward.outcome import targets
from harness1.rl.task_stream import PlacedTask, in_turn
from harness1.sft.collect import check_taught_split

DEV = "dev"
"""The split that is watched, where a dataset has it."""


class TaskChoice(NamedTuple):
    """`held_out` has nothing in common with `tasks`."""

    tasks: list[PlacedTask]
    held_out: list[PlacedTask]


def choose_tasks(
    sources: Sequence[Source], split: str, admitted: Sequence[frozenset[str] | None], config: Config
) -> TaskChoice:
    """All tasks of a split of each dataset, and `train.watch.tasks` held-out ones, of each dataset in turn: those of
    its split `dev`, or some of the tasks themselves, drawn by `rl.seed`, if it has none or that is the split to learn
    from.

    Args:
        admitted: for each dataset the ids of the tasks that may be sampled; None: all.

    Raises:
        UsageError: there is no such split, it is the one that is tested on, or it is empty; or a task lacks its gold.
    """
    learned, validation = [], []
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
        learned.append(_placed(tasks, setup))
        validation.append(_placed(held_out, setup))
    return TaskChoice([task for tasks in learned for task in tasks], in_turn(validation, wanted))


def _placed(tasks: Sequence[Task], setup: int) -> list[PlacedTask]:
    return [PlacedTask(task, setup) for task in tasks]
