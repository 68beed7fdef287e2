"""Finds tasks that must not be learned because they give an evaluation task away: they ask the same, or everything that
they ask for is exactly what it asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness1.data.open import open_source
from harness1.data.query_overlap import KnownQueries
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.records import DocId, Gold, Task

TEST = "test"
"""The split that is never taught."""
EVALUATION = ("dev", TEST)
"""Splits that are not learned, unless one of them was taught on purpose."""

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
    """Return the sets of tasks that must not be learned, each once.

    Args:
        sources: datasets whose splits `dev` and `test` are taken.
        taught: splits, as (name of the dataset, split), that are learned on purpose. They are left out of `sources`,
            except for `test`.
        against: further sets: `DATASET:SPLIT`, or a dataset, whose `dev` and `test` are taken, or else all its splits.

    Raises:
        UsageError: a set does not exist.
    """
    wanted = [
        (source, split)
        for source in sources
        for split in _own_splits(source)
        if split == TEST or (source.name, split) not in taught
    ]
    for spec in against:
        source, split = _named(spec)
        splits = (split,) if split else _own_splits(source) or source.splits
        if not splits:
            raise UsageError(f"--against {spec}: it has no queries")
        wanted += [(source, each) for each in splits]
    each = {(source.name, split): source for source, split in wanted}
    return [EvaluationSet(name, split, source.tasks(split)) for (name, split), source in each.items()]


class Leak(NamedTuple):
    """What a task gives away: the evaluation task that asks the same, and the one that has the same gold set; "" where
    there is none."""

    near: str
    gold: str

    @property
    def reason(self) -> str:
        said = {f"asks the same as {self.near}": self.near, f"has the gold set of {self.gold}": self.gold}
        return " and ".join(words for words, name in said.items() if name)


class Leaks:
    """Evaluation tasks, with which others are compared.

    Gold sets of one document are compared within a dataset, because two datasets may use one id for different
    documents. Larger ones are compared with all: where they agree, the documents are the same, as with tasks made
    from a corpus.

    Args:
        near: as in `KnownQueries`.
    """

    def __init__(self, near: float, sets: Sequence[EvaluationSet] = ()) -> None:
        self.compared = {each.name: len(each.tasks) for each in sets}
        """Sizes of the sets."""
        self._queries = KnownQueries(near)
        self._golds: dict[tuple[str, GoldSet], str] = {}
        """By dataset, which is "" for gold sets of several documents."""
        for each in sets:
            for task in each.tasks:
                name = f"{each.name}/{task.task_id}"
                self._queries.add(name, task.query)
                self._golds.setdefault(_within(each.dataset, gold_set(task.gold)), name)

    def find(self, dataset: str, query: str, gold: GoldSet) -> Leak | None:
        """Return what a task gives away, or None."""
        found = Leak(self._queries.match(query) or "", self._golds.get(_within(dataset, gold), "") if gold else "")
        return found if any(found) else None


def _within(dataset: str, gold: GoldSet) -> tuple[str, GoldSet]:
    return dataset if len(gold) < 2 else "", gold


def _own_splits(source: Source) -> tuple[str, ...]:
    return tuple(split for split in EVALUATION if split in source.splits)


def _named(spec: str) -> tuple[Source, str]:
    """Return a dataset and its split, if one is named: names of datasets may hold colons themselves."""
    try:
        return open_source(spec), ""
    except UsageError:
        dataset, colon, split = spec.rpartition(":")
        if not colon or dataset == "world":
            raise
    return open_source(dataset), split
