"""Measures of a ranking against targets, equal to those of `trec_eval` where the targets are documents.

A ranking is a sequence of unit ids, best first. Repeated ids are skipped: each unit counts once and no share exceeds 1.
If facts are scored, a target is a set of alternative chunks, met at the place of the best-ranked one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from harness1.records import Record, UnitId

DEPTHS = (1, 3, 5, 10, 15, 30)
"""Depths k of success, precision and recall."""

Target = frozenset[UnitId]
"""Alternative units, any one of which is enough: a single document, or the chunks that state one fact."""


class Wanted(NamedTuple):
    """The targets of a ranking, and the grade of each, above 0."""

    targets: tuple[Target, ...]
    grades: tuple[int, ...]


def graded(grades: Mapping[UnitId, int]) -> Wanted:
    """Return relevance judgements of single units as targets: those with a grade above 0."""
    relevant = {unit: grade for unit, grade in grades.items() if grade > 0}
    return Wanted(tuple(frozenset({unit}) for unit in relevant), tuple(relevant.values()))


class Judged(Record):
    """A ranking matched with its targets. Places count from 1. Every measure is in [0, 1], and 0 if either is empty."""

    size: int
    """Units ranked, each counted once."""
    relevant: tuple[int, ...]
    """Places of the units that belong to a target, ascending."""
    met: tuple[float, ...]
    """For each target, the place of the first unit that meets it; infinite if none does."""
    grades: tuple[int, ...]
    """Grade of each target."""
    ideal: tuple[int, ...]
    """Grades that an ideal ranking gains at each place."""

    def recall(self, depth: float = math.inf) -> float:
        """Return the share of the targets met at this depth or above."""
        met = sum(place <= depth for place in self.met if place < math.inf)
        return met / len(self.met) if self.met else 0.0

    def precision(self, depth: float = math.inf) -> float:
        """Return the share of the first `depth` places that hold a relevant unit, empty places included; without a
        depth, the share of the ranked units that are relevant."""
        places = self.size if depth == math.inf else depth
        return self._relevant(depth) / places if places else 0.0

    def success(self, depth: float) -> float:
        """Return 1 if a relevant unit is at this depth or above, else 0."""
        return float(self._relevant(depth) > 0)

    def reciprocal_rank(self) -> float:
        """Return 1 / the place of the first relevant unit."""
        return 1.0 / self.relevant[0] if self.relevant else 0.0

    def average_precision(self) -> float:
        """Return the mean over the targets of the precision at the place where each is met, 0 for unmet ones."""
        precisions = [self.precision(place) for place in self.met if place < math.inf]
        return math.fsum(precisions) / len(self.met) if self.met else 0.0

    def ndcg(self, depth: float) -> float:
        """Return grades discounted by log2(1 + place) (Järvelin and Kekäläinen 2002, with the grade itself as the
        gain), as a share of the ideal ranking's. Meeting a fact again gains nothing (alpha-nDCG with alpha = 1, Clarke
        et al. 2008, whose greedy ideal can fall short of the best: the share is then 1)."""
        ideal = _discounted(enumerate(self.ideal, start=1), depth)
        return min(1.0, _discounted(zip(self.met, self.grades, strict=True), depth) / ideal) if ideal else 0.0

    def _relevant(self, depth: float) -> int:
        return bisect_right(self.relevant, depth)


def match_targets(ranked: Sequence[UnitId], wanted: Wanted) -> Judged:
    """Match a ranking with its targets, in one pass for all measures."""
    places = {unit: place for place, unit in enumerate(dict.fromkeys(ranked), start=1)}
    relevant = frozenset().union(*wanted.targets)
    return Judged(
        size=len(places),
        relevant=tuple(place for unit, place in places.items() if unit in relevant),
        met=tuple(
            min((places[unit] for unit in target if unit in places), default=math.inf) for target in wanted.targets
        ),
        grades=wanted.grades,
        ideal=tuple(_ideal(wanted)),
    )


def measures(judged: Judged) -> dict[str, float]:
    """Return every measure of `MEASURES` by name."""
    return {name: measure(judged) for name, measure in MEASURES.items()}


def _at(measure: Callable[[Judged, float], float], depth: int) -> Callable[[Judged], float]:
    return lambda judged: measure(judged, depth)


MEASURES: Mapping[str, Callable[[Judged], float]] = MappingProxyType(
    {
        **{f"R@{depth}": _at(Judged.recall, depth) for depth in DEPTHS},
        **{f"P@{depth}": _at(Judged.precision, depth) for depth in DEPTHS},
        **{f"Success@{depth}": _at(Judged.success, depth) for depth in DEPTHS},
        "nDCG@10": _at(Judged.ndcg, 10),
        "AP": Judged.average_precision,
        "RR": Judged.reciprocal_rank,
    }
)
"""The measures that depend on the order. To add one, add a line here."""


def _discounted(gains: Iterable[tuple[float, int]], depth: float) -> float:
    """Return the sum of the discounted gains down to a depth, whatever the order of the terms."""
    return math.fsum(gain / math.log2(1 + place) for place, gain in gains if place <= depth)


def _ideal(wanted: Wanted) -> Iterator[int]:
    """Yield the ideal gains; where targets share units, the next unit is the one that meets most of what is left."""
    units = sorted(frozenset().union(*wanted.targets))
    if len(units) == sum(map(len, wanted.targets)):
        yield from sorted(wanted.grades, reverse=True)
        return
    left = list(zip(wanted.targets, wanted.grades, strict=True))
    while left:
        gains = {unit: sum(grade for target, grade in left if unit in target) for unit in units}
        best = max(units, key=gains.__getitem__)
        yield gains[best]
        left = [(target, grade) for target, grade in left if best not in target]
