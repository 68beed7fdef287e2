"""Leaves out tasks that must not be learned because they give an evaluation task away: they ask the same, in equal
words once normalised or in nearly the same by MinHash, or everything that they ask for is exactly what it asks for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from harness1.config import Data
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.memory.dedup import signature
from harness1.plain import counted, digest
from harness1.records import DocId, Gold, Record, Task

SEED = 123  # seed of the division into shares
PERMUTATIONS = 128  # hashes in a signature. The estimate of a similarity of 0.8 has a standard error of 0.035.
ShareName = Literal["", "sft", "rl"]  # whose share of a split's tasks; empty: all of them
_WORD = re.compile(r"\w+")


def normalise(query: str) -> str:
    """Return the words of a query in order, without case, punctuation and compatibility forms of characters."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", query).casefold()))


class KnownQueries:
    """Named queries to compare others with, each with all, so that nothing is missed. `near`: the Jaccard similarity
    of the word sets of two queries, as MinHash estimates it, from which they are the same."""

    def __init__(self, near: float, queries: Iterable[tuple[str, str]] = ()) -> None:
        self._near = near
        self._exact: dict[str, str] = {}
        self._names: list[str] = []
        self._signatures = np.empty((PERMUTATIONS, 64), "<u4")  # by columns, along which comparing is fastest
        for name, query in queries:
            self.add(name, query)

    def add(self, name: str, query: str) -> None:
        """Add a query. If several are equal once normalised, the name of the first is kept."""
        words = normalise(query)
        if words in self._exact:
            return
        self._exact[words] = name
        if words:
            if len(self._names) == self._signatures.shape[1]:
                self._signatures = np.concatenate([self._signatures, np.empty_like(self._signatures)], axis=1)
            self._signatures[:, len(self._names)] = _signature(words)
            self._names.append(name)

    def equal(self, query: str) -> str | None:
        """Return the name of the known query that is equal once normalised."""
        return self._exact.get(normalise(query))

    def match(self, query: str) -> str | None:
        """Return the name of the known query that asks the same: the equal one, else the most similar, the earliest."""
        words = normalise(query)
        if words in self._exact or not words or not self._names:
            return self._exact.get(words)
        equal = self._signatures[:, : len(self._names)] == _signature(words)[:, None]
        similar = equal.view(np.uint8).sum(axis=0, dtype=np.uint8)
        best = int(similar.argmax())
        return self._names[best] if similar[best] / PERMUTATIONS >= self._near else None


def _signature(words: str) -> np.ndarray:
    return np.frombuffer(signature(words, PERMUTATIONS, shingle=1), "<u4")


TEST = "test"  # the split that is never taught
EVALUATION = ("dev", TEST)  # splits that are not learned, unless one of them was taught on purpose

GoldSet = frozenset[DocId]


def gold_set(gold: Gold | None) -> GoldSet:
    """Return the relevant documents of a task; none if its gold is unknown."""
    return frozenset(name for name, grade in gold.relevant.items() if grade > 0) if gold else frozenset()


@dataclass(frozen=True)
class EvaluationSet:
    """Tasks that must not be learned."""

    dataset: str
    split: str
    tasks: Sequence[Task]

    @property
    def name(self) -> str:
        return f"{self.dataset}:{self.split}"


def evaluation_sets(
    sources: Iterable[Source], against: Sequence[str], taught: Collection[tuple[str, str]] = ()
) -> list[EvaluationSet]:
    """Return the sets of tasks that must not be learned, each once: `dev` and `test` of the sources, but for a `dev`
    in `taught`, (name of the dataset, split); and those of `against`: `DATASET:SPLIT`, or a dataset, whose `dev` and
    `test` are taken, or else all its splits. Raises UsageError: a set does not exist."""
    own = [(source, split) for source in sources for split in _own_splits(source)]
    wanted = [(source, split) for source, split in own if split == TEST or (source.name, split) not in taught]
    for spec in against:
        try:
            source, split = open_source(spec), ""
        except UsageError:  # names of datasets may hold colons themselves
            dataset, colon, split = spec.rpartition(":")
            if not colon or dataset == "world":
                raise
            source = open_source(dataset)
        splits = (split,) if split else _own_splits(source) or source.splits
        if not splits:
            raise UsageError(f"--against {spec}: it has no queries")
        wanted += [(source, each) for each in splits]
    each = {(source.name, split): source for source, split in wanted}
    return [EvaluationSet(name, split, source.tasks(split)) for (name, split), source in each.items()]


class Leak(NamedTuple):
    """What a task gives away: the evaluation task that asks the same, and the one of the same gold set; "" for none."""

    near: str
    gold: str

    @property
    def reason(self) -> str:
        said = (self.near and f"asks the same as {self.near}", self.gold and f"has the gold set of {self.gold}")
        return " and ".join(filter(None, said))


class Leaks:
    """Evaluation tasks, with which others are compared. Gold sets of one document are compared within a dataset,
    because two datasets may use one id for different documents; larger ones with all."""

    def __init__(self, near: float, sets: Sequence[EvaluationSet] = ()) -> None:
        self.compared = {each.name: len(each.tasks) for each in sets}
        self._queries, self._golds = KnownQueries(near), dict[tuple[str, GoldSet], str]()
        for each in sets:
            for task in each.tasks:
                name, gold = f"{each.name}/{task.task_id}", gold_set(task.gold)
                self._queries.add(name, task.query)
                self._golds.setdefault((each.dataset if len(gold) < 2 else "", gold), name)

    def find(self, dataset: str, query: str, gold: GoldSet) -> Leak | None:
        """Return what a task gives away, or None."""
        same = self._golds.get((dataset if len(gold) < 2 else "", gold), "") if gold else ""
        found = Leak(self._queries.match(query) or "", same)
        return found if any(found) else None


def _own_splits(source: Source) -> tuple[str, ...]:
    return tuple(split for split in EVALUATION if split in source.splits)


class Selection(Record, kw_only=True):
    """The choice of the tasks of one split, with the number of tasks that each step left out."""

    dataset: str
    split: str
    tasks: int  # tasks of the split
    share: ShareName = ""
    outside: int = 0  # tasks of the other share
    excluded: int = 0  # tasks of the runs that were excluded
    near: int = 0  # tasks that ask what an evaluation task asks
    gold: int = 0  # tasks that have the gold set of an evaluation task; some of them are `near` too
    leaked: int = 0  # tasks left out for either
    compared: dict[str, int] = {}  # sizes of the evaluation sets; none with `data.leaks` = "keep"
    held_out: tuple[str, ...] = ()  # ids of the tasks of this split that training is validated on
    beside: int = 0  # tasks left out because they give away a validation task
    rejected: int = 0  # tasks that admission rejected
    learned: tuple[str, ...] = ()  # ids of the tasks that are left

    @property
    def line(self) -> str:
        """Say what was left out, in one line, or return "" if nothing was."""
        # The evaluation sets of the dataset itself are named by their split alone: a dev or test query.
        evaluation = " or ".join(name.removeprefix(f"{self.dataset}:") for name in self.compared)
        leaked = f"{counted(self.near, 'task')} near a {evaluation} query"
        if self.gold and self.near:
            leaked += f" and {self.gold} that share a gold set with one ({self.leaked} in all)"
        elif self.gold:
            leaked = f"{counted(self.gold, 'task')} that share a gold set with a {evaluation} task"
        said = {
            f"{counted(self.outside, 'task')} of the other share": self.outside,
            f"{counted(self.excluded, 'task')} of earlier runs": self.excluded,
            leaked: self.leaked,
            f"{counted(self.beside, 'task')} that give away a validation task": self.beside,
            f"{counted(self.rejected, 'task')} not admitted": self.rejected,
        }
        told = ", ".join(words for words, count in said.items() if count)
        taken = f"{len(self.learned)} of {counted(self.tasks, 'task')} are taken"
        return f"{self.dataset} {self.split}: left out {told}; {taken}" if told else ""


@dataclass(frozen=True)
class TaskFilter:
    """Leaves out what gives away a task of `sets`, is of the other share, or was a task of earlier runs, (dataset,
    id)."""

    data: Data
    sets: Sequence[EvaluationSet] = ()
    share: ShareName = ""
    excluded: Collection[tuple[str, str]] = frozenset()

    @cached_property
    def leaks(self) -> Leaks:
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
        return self._apart(tasks, dataset, others)

    def beside(self, held_out: Sequence[Task], dataset: str, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks that give away none of the validation tasks drawn from the same split."""
        sets = [EvaluationSet(dataset, "validation", held_out)] if self.data.leaks == "drop" else []
        return self._apart(tasks, dataset, sets)

    def _apart(self, tasks: Sequence[Task], dataset: str, sets: Sequence[EvaluationSet]) -> list[Task]:
        leaks = Leaks(self.data.near, sets)
        return [task for task in tasks if leaks.find(dataset, task.query, gold_set(task.gold)) is None]


def open_filter(
    data: Data,
    sources: Sequence[Source],
    taught: Collection[tuple[str, str]],
    *,
    share: ShareName = "",
    against: Sequence[str] = (),
    excluded: Collection[tuple[str, str]] = frozenset(),
) -> TaskFilter:
    """Return the filter for learning from the `taught` splits, (dataset, split), of some datasets. Raises
    UsageError: a set of `against` does not exist, or nothing is compared."""
    if data.leaks == "keep" and against:
        raise UsageError("--against compares with evaluation sets, which data.leaks=keep turns off")
    sets = evaluation_sets(sources, against, taught) if data.leaks != "keep" else ()
    return TaskFilter(data, sets, share, excluded)


def in_share(tasks: Sequence[Task], share: ShareName, data: Data) -> list[Task]:
    """Return the tasks of a share, in their order: `data.sft_share` of them for "sft", the others for "rl". Tasks
    with the same gold set share it, and two commands divide alike."""
    if not share:
        return list(tasks)
    groups: dict[GoldSet | str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(gold_set(task.gold) or task.task_id, []).append(task)
    wanted, taken = round(data.sft_share * len(tasks)), 0
    chosen: set[str] = set()
    for group in sorted(groups.values(), key=lambda group: digest([SEED, min(task.task_id for task in group)])):
        if taken + len(group) <= wanted:
            taken += len(group)
            chosen.update(task.task_id for task in group)
    return [task for task in tasks if (task.task_id in chosen) == (share == "sft")]
