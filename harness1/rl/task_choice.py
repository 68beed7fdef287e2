"""Choose the tasks of a training run and those of its validation."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import msgspec

from harness1.config import Config
from harness1.data.leaks import Selection, TaskFilter, open_filter
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.records import Task
from harness1.reward.measures import targets
from harness1.rl.task_stream import PlacedTask
from harness1.sft.collect import check_taught_split

DEV = "dev"
"""The split for validation, if a dataset has it."""


class TaskChoice(NamedTuple):
    """The tasks to learn from, and the validation tasks; no task is in both."""

    tasks: list[PlacedTask]
    held_out: list[PlacedTask]
    selections: list[Selection]
    """The account of the choice, for each dataset."""


def choose_tasks(
    sources: Sequence[Source],
    split: str,
    admitted: Sequence[frozenset[str] | None],
    config: Config,
    sieve: TaskFilter | None = None,
) -> TaskChoice:
    """Choose the tasks of a split of each dataset that may be learned from, and `train.watch.tasks` validation tasks,
    from each dataset in turn: from its split `dev`, or drawn from the tasks by `rl.seed` if there is no `dev` or it is
    the split to learn from.

    Unless `data.leaks` is "keep", what is learned gives away no validation task, and neither gives away a test task.

    Args:
        admitted: for each dataset, the ids of the tasks that may be learned from; None means all.
        sieve: leaves out what must not be learned; default: the filter that `open_filter` opens.

    Raises:
        UsageError: the split is missing, reserved for testing, or has no task left to learn from; or a task lacks its
            gold.
    """
    for source in sources:
        check_taught_split(split, source.name)
    sieve = sieve or open_filter(config.data, sources, {(source.name, split) for source in sources})
    choice = TaskChoice([], [], [])
    validation: list[list[PlacedTask]] = []
    for setup, (source, ids) in enumerate(zip(sources, admitted, strict=True)):
        tasks, held_out, account = _choose(source, split, ids, len(sources), config, sieve)
        for task in (*tasks, *held_out):
            targets(task.task_id, task.gold, config.index.unit)
        choice.tasks.extend(PlacedTask(task, setup) for task in tasks)
        choice.selections.append(account)
        validation.append([PlacedTask(task, setup) for task in held_out])
    return choice._replace(held_out=in_turn(validation, config.train.watch.tasks))


def in_turn(each: Sequence[Sequence[PlacedTask]], limit: int) -> list[PlacedTask]:
    """Take the first `limit` tasks of several datasets, one from each in turn."""
    longest = max(map(len, each), default=0)
    return [tasks[at] for at in range(longest) for tasks in each if at < len(tasks)][:limit]


def _choose(
    source: Source, split: str, admitted: frozenset[str] | None, datasets: int, config: Config, sieve: TaskFilter
) -> tuple[list[Task], list[Task], Selection]:
    """Choose the tasks and the validation tasks of one of several datasets."""
    wanted, drawn = config.train.watch.tasks, tuple[str, ...]()
    tasks, account = sieve.select(source.name, split, source.tasks(split))
    if DEV in source.splits and split != DEV:
        held_out = sieve.validation(source.name, DEV, source.tasks(DEV))[:wanted]
        apart = tasks
    else:
        share = min(wanted // datasets + 1 if wanted else 0, len(tasks) // 2)
        places = set(Random(f"{config.rl.seed}/held out").sample(range(len(tasks)), share))
        held_out = [task for at, task in enumerate(tasks) if at in places]
        drawn = tuple(task.task_id for task in held_out)
        apart = sieve.beside(held_out, source.name, [task for at, task in enumerate(tasks) if at not in places])
    left = [task for task in apart if admitted is None or task.task_id in admitted]
    account = msgspec.structs.replace(
        account,
        held_out=drawn,
        beside=len(tasks) - len(drawn) - len(apart),
        rejected=len(apart) - len(left),
        learned=tuple(task.task_id for task in left),
    )
    if not left:
        raise UsageError(account.line or f"{source.name} has no tasks in split {split}")
    return left, held_out, account
