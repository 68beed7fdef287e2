"""Pseudo relevance feedback inside the pool: how much a unit reads like the best ones (Rocchio 1971, "Relevance
feedback in information retrieval")."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from harness1.memory.forkable import Forkable

READ_TERMS = 400
"""Terms of a unit that count."""
FEW_TERMS = 50
"""A unit of this many terms counts half: the fewer words it has, the less their likeness says."""


class Vocabulary(Forkable):
    """The words of pooled units, the question's own left out. Only `add` writes the fields."""

    terms: dict[str, int] = {}
    """Terms with their numbers."""
    sizes: list[int] = []
    """Distinct terms of each unit."""
    numbers: bytearray = bytearray()
    """Unit by unit, the numbers of its terms, int32."""
    often: bytearray = bytearray()
    """Beside them, the logarithms of 1 + how often the unit has the term, float64."""

    def add(self, terms: Iterable[str], asked: Container[str]) -> None:
        """Take in the terms of the next unit.

        Args:
            asked: terms that are left out.
        """
        counts = Counter([term for term in islice(terms, READ_TERMS) if term not in asked])
        numbers = [self.terms.setdefault(term, len(self.terms)) for term in counts]
        self.sizes.append(len(numbers))
        self.numbers += np.array(numbers, np.int32).tobytes()
        self.often += np.log1p(np.array(list(counts.values()), np.float64)).tobytes()

    def likeness(self, best: Sequence[int]) -> NDArray[np.float64]:
        """Return the mean cosine of each unit with the best ones, itself left out, as a share of the highest; less for
        short units.

        Terms weigh more the rarer they are in the pool, and the n-th of the best units counts 1 / (1 + n).
        """
        sizes = self.sizes
        units, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum([0, *sizes])
        terms = np.frombuffer(self.numbers, np.int32)
        rarity = np.log1p(len(sizes) / np.maximum(np.bincount(terms, minlength=1), 1))
        weights = np.frombuffer(self.often) * rarity[terms]
        lengths = np.sqrt(np.bincount(units, weights * weights, len(sizes)))
        weights /= np.maximum(lengths, 1e-9)[units]
        shares = np.full(len(sizes), sum(1 / (2 + place) for place in range(len(best))))
        centre, own = np.zeros(len(rarity)), np.zeros(len(sizes))
        for place, unit in enumerate(best):
            held = slice(starts[unit], starts[unit + 1])
            centre[terms[held]] += weights[held] / (2 + place)
            own[unit] = (lengths[unit] > 0) / (2 + place)
            shares[unit] -= 1 / (2 + place)
        cosines = np.bincount(units, weights * centre[terms], len(sizes)) - own
        found = np.round(np.maximum(cosines, 0.0) / np.maximum(shares, 1e-9), 9)
        counts = np.array(sizes)
        likeness: NDArray[np.float64] = counts / (counts + FEW_TERMS) * found / max(float(found.max()), 1e-9)
        return likeness
