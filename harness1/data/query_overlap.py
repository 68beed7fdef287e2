"""Finds queries that ask the same thing: equal once normalised, or with nearly the same words by MinHash."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.memory.dedup import signature

TEST = "test"
"""The split that is never taught."""
EVALUATION = ("dev", TEST)
"""Splits that are not learned, unless one of them was taught on purpose."""
PERMUTATIONS = 128
"""Hashes in a signature. The estimate of a similarity of 0.8 has a standard error of 0.035."""
_WORD = re.compile(r"\w+")


def normalised(query: str) -> str:
    """Return the words of a query in order, without case, punctuation and compatibility forms of characters."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", query).casefold()))


class KnownQueries:
    """Named queries to compare others with.

    Every query is compared with all known ones: with some ten thousand of them this takes a millisecond,
    and it misses nothing, unlike locality-sensitive hashing close to the threshold.

    Args:
        near: two queries whose word sets have at least this Jaccard similarity, as MinHash estimates it, are the same.
        queries: pairs of a name and a query.
    """

    def __init__(self, near: float, queries: Iterable[tuple[str, str]] = ()) -> None:
        self._near = near
        self._exact: dict[str, str] = {}
        self._names: list[str] = []
        self._signatures = np.empty((64, PERMUTATIONS), "<u4")
        for name, query in queries:
            self.add(name, query)

    def add(self, name: str, query: str) -> None:
        """Add a query. If several are equal once normalised, the name of the first is kept."""
        words = normalised(query)
        if words in self._exact:
            return
        self._exact[words] = name
        if words:
            if len(self._names) == len(self._signatures):
                self._signatures = np.concatenate([self._signatures, np.empty_like(self._signatures)])
            self._signatures[len(self._names)] = _signature(words)
            self._names.append(name)

    def equal(self, query: str) -> str | None:
        """Return the name of the known query that is equal once normalised."""
        return self._exact.get(normalised(query))

    def match(self, query: str) -> str | None:
        """Return the name of the known query that asks the same: the equal one, else the most similar, else the
        earliest."""
        words = normalised(query)
        if words in self._exact or not words or not self._names:
            return self._exact.get(words)
        similar = (self._signatures[: len(self._names)] == _signature(words)).mean(axis=1)
        best = int(similar.argmax())
        return self._names[best] if similar[best] >= self._near else None


def _signature(words: str) -> np.ndarray:
    return np.frombuffer(signature(words, PERMUTATIONS, shingle=1), "<u4")


Queries = list[tuple[str, str]]
"""Names, each with a query."""


def evaluation_queries(
    sources: Iterable[Source], against: Sequence[str], taught: Collection[tuple[str, str]] = ()
) -> dict[str, Queries]:
    """Return the queries that must not be learned, by the set that they belong to.

    Args:
        sources: datasets whose splits `dev` and `test` are taken.
        taught: splits, as (name of the dataset, split), that teachers were set on purpose. They are left out of
            `sources`, except for `test`.
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
    return {f"{source.name}:{split}": _queries(source, split) for source, split in wanted}


def _own_splits(source: Source) -> tuple[str, ...]:
    return tuple(split for split in EVALUATION if split in source.splits)


def _queries(source: Source, split: str) -> Queries:
    return [(f"{source.name}:{split}/{task.task_id}", task.query) for task in source.tasks(split)]


def _named(spec: str) -> tuple[Source, str]:
    """Return a dataset and its split, if one is named: names of datasets may hold colons themselves."""
    try:
        return open_source(spec), ""
    except UsageError:
        dataset, colon, split = spec.rpartition(":")
        if not colon or dataset == "world":
            raise
    return open_source(dataset), split
