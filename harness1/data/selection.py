"""Chooses the tasks of a split that may be learned from, and says for the card of a run what was left out and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from harness1.config import Data
from harness1.data.leaks import EvaluationSet, GoldSet, Leaks, evaluation_sets, gold_set
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.plain import counted
from harness1.records import Record, Task

ShareName = Literal["", "sft", "rl"]


class Selection(Record, kw_only=True):
    """The choice of the tasks of one split, with the number of tasks that each step left out."""

    dataset: str
    split: str
    tasks: int
    """Tasks of the split."""
    share: ShareName = ""
    outside: int = 0
    """Tasks of the other share."""
    excluded: int = 0
    """Tasks of the runs that were excluded."""
    near: int = 0
    """Tasks that ask what an evaluation task asks."""
    gold: int = 0
    """Tasks that have the gold set of an evaluation task; some of them are `near` too."""
    leaked: int = 0
    """Tasks left out for either."""
    compared: dict[str, int] = {}
    """Sizes of the evaluation sets; none with `data.leaks` = "keep"."""
    held_out: tuple[str, ...] = ()
    """Ids of the tasks of this split that training is validated on."""
    beside: int = 0
    """Tasks left out because they give away a validation task."""
    rejected: int = 0
    """Tasks that admission rejected."""
    learned: tuple[str, ...] = ()
    """Ids of the tasks that are left."""

    @property
    def line(self) -> str:
        """Say what was left out, in one line, or return "" if nothing was."""
        said = {
            f"{counted(self.outside, 'task')} of the other share": self.outside,
            f"{counted(self.excluded, 'task')} of earlier runs": self.excluded,
            self._leaked: self.leaked,
            f"{counted(self.beside, 'task')} that give away a validation task": self.beside,
            f"{counted(self.rejected, 'task')} not admitted": self.rejected,
        }
        told = ", ".join(words for words, count in said.items() if count)
        taken = f"{len(self.learned)} of {counted(self.tasks, 'task')} are taken"
        return f"{self.dataset} {self.split}: left out {told}; {taken}" if told else ""

    @property
    def _leaked(self) -> str:
        # The evaluation sets of the dataset itself are named by their split alone: a dev or test query.
        evaluation = " or ".join(name.removeprefix(f"{self.dataset}:") for name in self.compared)
        near, gold = (
            f"{counted(self.near, 'task')} near a {evaluation} query",
            f"{self.gold} that share a gold set with one",
        )
        if not self.near:
            return f"{counted(self.gold, 'task')} that share a gold set with a {evaluation} task"
        return f"{near} and {gold} ({self.leaked} in all)" if self.gold else near


@dataclass(frozen=True)
class TaskFilter:
    """Leaves out what must not be learned.

    Args:
        sets: the evaluation sets that must not be given away.
        share: one of the two shares of a split, or "" for the whole.
        excluded: tasks, as (dataset, id), that earlier runs were made of.
    """

    data: Data
    sets: Sequence[EvaluationSet] = ()
    share: ShareName = ""
    excluded: Collection[tuple[str, str]] = frozenset()

    @cached_property
    def leaks(self) -> Leaks:
        """Return the comparison with all evaluation sets."""
        return Leaks(self.data.near, self.sets)

    def select(self, dataset: str, split: str, tasks: Sequence[Task]) -> tuple[list[Task], Selection]:
        """Return the tasks of a split that may be learned from, in their order, and the account of the choice."""
        inside = in_share(tasks, self.share, self.data)
        unseen = [task for task in inside if (dataset, task.task_id) not in self.excluded]
        found = {task.task_id: self.leaks.find(dataset, task.query, gold_set(task.gold)) for task in unseen}
        kept = [task for task in unseen if found[task.task_id] is None]
        leaked = [leak for leak in found.values() if leak is not None]
        account = Selection(
            dataset=dataset,
            split=split,
            tasks=len(tasks),
            share=self.share,
            outside=len(tasks) - len(inside),
            excluded=len(inside) - len(unseen),
            near=sum(bool(leak.near) for leak in leaked),
            gold=sum(bool(leak.gold) for leak in leaked),
            leaked=len(leaked),
            compared=self.leaks.compared,
            learned=tuple(task.task_id for task in kept),
        )
        return kept, account

    def validation(self, dataset: str, split: str, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of an evaluation split that give away none of the other evaluation sets."""
        others = [each for each in self.sets if (each.dataset, each.split) != (dataset, split)]
        return _apart(tasks, dataset, Leaks(self.data.near, others))

    def beside(self, held_out: Sequence[Task], dataset: str, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks that give away none of the validation tasks drawn from the same split."""
        sets = [EvaluationSet(dataset, "validation", held_out)] if self.data.leaks == "drop" else []
        return _apart(tasks, dataset, Leaks(self.data.near, sets))


def open_filter(
    data: Data,
    sources: Sequence[Source],
    taught: Collection[tuple[str, str]],
    *,
    share: ShareName = "",
    against: Sequence[str] = (),
    excluded: Collection[tuple[str, str]] = frozenset(),
) -> TaskFilter:
    """Return the filter for learning from some datasets.

    Args:
        taught: the splits to learn from, as (name of the dataset, split).
        against: evaluation sets beside `dev` and `test` of the datasets, as `evaluation_sets` reads them.

    Raises:
        UsageError: a set does not exist, or nothing is compared because `data.leaks` is "keep".
    """
    if data.leaks == "keep":
        if against:
            raise UsageError("--against compares with evaluation sets, which data.leaks=keep turns off")
        return TaskFilter(data, (), share, excluded)
    return TaskFilter(data, evaluation_sets(sources, against, taught), share, excluded)


def in_share(tasks: Sequence[Task], share: ShareName, data: Data) -> list[Task]:
    """Return the tasks of a share, in their order: `data.sft_share` of them for "sft", the others for "rl".

    Tasks with the same gold set are in the same share. The choice depends on the whole split and the seed alone, so
    that two commands divide alike.
    """
    if not share:
        return list(tasks)
    groups: dict[GoldSet | str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(gold_set(task.gold) or task.task_id, []).append(task)
    wanted, taken = round(data.sft_share * len(tasks)), 0
    chosen: set[str] = set()
    for group in sorted(groups.values(), key=lambda group: digest([data.seed, min(task.task_id for task in group)])):
        if taken + len(group) <= wanted:
            taken += len(group)
            chosen.update(task.task_id for task in group)
    return [task for task in tasks if (task.task_id in chosen) == (share == "sft")]


def _apart(tasks: Sequence[Task], dataset: str, leaks: Leaks) -> list[Task]:
    return [task for task in tasks if leaks.find(dataset, task.query, gold_set(task.gold)) is None]
