"""Pseudo relevance feedback inside the pool: how much a unit reads like the best ones (Rocchio 1971, "Relevance
feedback in information retrieval")."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from harness1.memory.forkable import Forkable
from harness1.memory.question import content_terms

READ_CHARACTERS = 3000
"""Characters of a unit that are read for its words."""
FEW_TERMS = 50
"""A unit of this many terms counts half: the fewer words it has, the less their likeness says."""


class Vocabulary(Forkable):
    """The words of pooled units, the question's own left out. Only `add` writes the fields."""

    terms: dict[str, int] = {}
    """Terms with their numbers."""
    numbers: list[bytes] = []
    """Of each unit: the numbers of its terms, int32."""
    often: list[bytes] = []
    """Of each unit: the logarithms of 1 + how often it has each term, float64."""

    def add(self, text: str, asked: Set[str]) -> None:
        """Take in the text of the next unit.

        Args:
            asked: terms that are left out.
        """
        counts = Counter(content_terms(text[:READ_CHARACTERS]))
        for term in asked:
            counts.pop(term, None)
        numbers = [self.terms.setdefault(term, len(self.terms)) for term in counts]
        self.numbers.append(np.array(numbers, np.int32).tobytes())
        self.often.append(np.log1p(np.array(list(counts.values()), np.float64)).tobytes())

    def likeness(self, best: Sequence[int]) -> NDArray[np.float64]:
        """Return the mean cosine of each unit with the best ones, itself left out, as a share of the highest; less for
        short units.

        Terms weigh more the rarer they are in the pool, and the n-th of the best units counts 1 / (1 + n).
        """
        sizes = [len(numbers) // 4 for numbers in self.numbers]
        units, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum([0, *sizes])
        terms = np.frombuffer(b"".join(self.numbers), np.int32)
        rarity = np.log1p(len(sizes) / np.maximum(np.bincount(terms, minlength=1), 1))
        weights = np.frombuffer(b"".join(self.often)) * rarity[terms]
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
