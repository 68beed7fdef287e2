"""Finds queries that ask the same thing: equal once normalised, or with nearly the same words by MinHash."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

import numpy as np

from harness1.memory.dedup import signature

PERMUTATIONS = 128
"""Hashes in a signature. The estimate of a similarity of 0.8 has a standard error of 0.035."""
_WORD = re.compile(r"\w+")


def normalised(query: str) -> str:
    """Return the words of a query in order, without case, punctuation and compatibility forms of characters."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", query).casefold()))


class KnownQueries:
    """Named queries to compare others with.

    Every query is compared with all known ones: with some ten thousand of them this takes a third of a millisecond,
    and it misses nothing, unlike locality-sensitive hashing close to the threshold.

    Args:
        near: two queries whose word sets have at least this Jaccard similarity, as MinHash estimates it, are the same.
        queries: pairs of a name and a query.
    """

    def __init__(self, near: float, queries: Iterable[tuple[str, str]] = ()) -> None:
        self._near = near
        self._exact: dict[str, str] = {}
        self._names: list[str] = []
        self._signatures = np.empty((PERMUTATIONS, 64), "<u4")  # by columns, along which comparing is fastest
        for name, query in queries:
            self.add(name, query)

    def add(self, name: str, query: str) -> None:
        """Add a query. If several are equal once normalised, the name of the first is kept."""
        words = normalised(query)
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
        return self._exact.get(normalised(query))

    def match(self, query: str) -> str | None:
        """Return the name of the known query that asks the same: the equal one, else the most similar, else the
        earliest."""
        words = normalised(query)
        if words in self._exact or not words or not self._names:
            return self._exact.get(words)
        equal = self._signatures[:, : len(self._names)] == _signature(words)[:, None]
        similar = equal.view(np.uint8).sum(axis=0, dtype=np.uint8)
        best = int(similar.argmax())
        return self._names[best] if similar[best] / PERMUTATIONS >= self._near else None


def _signature(words: str) -> np.ndarray:
    return np.frombuffer(signature(words, PERMUTATIONS, shingle=1), "<u4")
