"""The outcome of a finished episode, measured against its gold once and then read by the reward and by every metric.
The measures of a ranking, a sequence of unit ids, best first, equal those of `trec_eval` where the targets are
documents. If facts are scored, a target is a set of alternative chunks, met at the place of the best-ranked one."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from types import MappingProxyType

from harness1.errors import UsageError
from harness1.records import Episode, Gold, Record, Status, Unit, UnitId

DEPTHS = (1, 3, 5, 10, 15, 30)  # depths k of success, precision and recall

Target = frozenset[UnitId]  # alternative units, any one of which is enough: a document, or chunks that state one fact


class Judged(Record):
    """A ranking matched with its targets. Places count from 1. Every measure is in [0, 1], and 0 if either is empty."""

    size: int  # units ranked, each counted once
    relevant: tuple[int, ...]  # places of the units that belong to a target, ascending
    met: tuple[float, ...]  # for each target, the place of the first unit that meets it; infinite if none does
    grades: tuple[int, ...]  # grade of each target
    ideal: tuple[int, ...]  # grades that an ideal ranking gains at each place

    def recall(self, depth: float = math.inf) -> float:
        met = sum(place <= depth for place in self.met if place < math.inf)
        return met / len(self.met) if self.met else 0.0

    def precision(self, depth: float = math.inf) -> float:
        """Return the share of relevant units in the first `depth` places, empty ones included, or in all ranked."""
        places = self.size if depth == math.inf else depth
        return self._relevant(depth) / places if places else 0.0

    def success(self, depth: float) -> float:
        return float(self._relevant(depth) > 0)

    def reciprocal_rank(self) -> float:
        return 1.0 / self.relevant[0] if self.relevant else 0.0

    def average_precision(self) -> float:
        """Return the mean over the targets of the precision at the place where each is met, 0 for unmet ones."""
        precisions = [self.precision(place) for place in self.met if place < math.inf]
        return math.fsum(precisions) / len(self.met) if self.met else 0.0

    def ndcg(self, depth: float) -> float:
        """Return grades discounted by log2(1 + place) (Järvelin and Kekäläinen 2002), as a share of the ideal
        ranking's. Meeting a fact again gains nothing (alpha-nDCG with alpha = 1, Clarke et al. 2008)."""
        ideal = _discount(enumerate(self.ideal, start=1), depth)
        return min(1.0, _discount(zip(self.met, self.grades, strict=True), depth) / ideal) if ideal else 0.0

    def _relevant(self, depth: float) -> int:
        return bisect_right(self.relevant, depth)


def match_targets(ranked: Sequence[UnitId], targets: Sequence[Target], grades: Sequence[int]) -> Judged:
    """Match a ranking with targets, each with its grade above 0, in one pass for all measures."""
    places = {unit: place for place, unit in enumerate(dict.fromkeys(ranked), start=1)}
    relevant = frozenset().union(*targets)
    met = (min((places[unit] for unit in target if unit in places), default=math.inf) for target in targets)
    return Judged(
        size=len(places),
        relevant=tuple(place for unit, place in places.items() if unit in relevant),
        met=tuple(met),
        grades=tuple(grades),
        ideal=tuple(_ideal(targets, grades)),
    )


def measures(judged: Judged) -> dict[str, float]:
    """Return every measure of `MEASURES` by name."""
    return {name: measure(judged) for name, measure in MEASURES.items()}


MEASURES: Mapping[str, Callable[[Judged], float]] = MappingProxyType(
    {
        **{f"R@{depth}": partial(Judged.recall, depth=depth) for depth in DEPTHS},
        **{f"P@{depth}": partial(Judged.precision, depth=depth) for depth in DEPTHS},
        **{f"Success@{depth}": partial(Judged.success, depth=depth) for depth in DEPTHS},
        "nDCG@10": partial(Judged.ndcg, depth=10),
        "AP": Judged.average_precision,
        "RR": Judged.reciprocal_rank,
    }
)
"""The measures that depend on the order. To add one, add a line here."""


def _discount(gains: Iterable[tuple[float, int]], depth: float) -> float:
    return math.fsum(gain / math.log2(1 + place) for place, gain in gains if place <= depth)


def _ideal(targets: Sequence[Target], grades: Sequence[int]) -> Iterator[int]:
    """Yield the ideal gains; where targets share units, the next unit is the one that meets most of what is left."""
    units = sorted(frozenset().union(*targets))
    if len(units) == sum(map(len, targets)):
        yield from sorted(grades, reverse=True)
        return
    left = list(zip(targets, grades, strict=True))
    while left:
        gains = {unit: sum(grade for target, grade in left if unit in target) for unit in units}
        best = max(units, key=gains.__getitem__)
        yield gains[best]
        left = [(target, grade) for target, grade in left if best not in target]


class Targets(Record):
    """The targets of an episode: everything relevant, and the part that holds the final answer."""

    relevant: tuple[Target, ...]
    answer: tuple[Target, ...]
    grades: tuple[int, ...]  # grade of each relevant target; 1 for facts


class Outcome(Record, kw_only=True):
    """The outcome of an episode. Shares are in [0, 1], and 0 if the curated set is empty. In the `*_alias` variants a
    curated unit also counts for the near duplicates that it represents."""

    recall: float = 0.0
    precision: float = 0.0
    f1: float = 0.0
    f2: float = 0.0
    answer_recall: float = 0.0
    recall_alias: float = 0.0
    precision_alias: float = 0.0
    answer_recall_alias: float = 0.0
    trajectory_recall: float = 0.0  # recall of all seen: the pool and the near duplicates that its units represent
    trajectory_answer_recall: float = 0.0
    ranked: dict[str, float] = {}  # measures of the curated set's order, by their name in `ranking.MEASURES`
    set_size: int = 0
    turns: int = 0  # turns with an action; a turn that ended in unreadable output has none
    calls: dict[str, int] = {}  # successful calls of each tool (an observation without error), except `end_search`
    tool_errors: int = 0  # calls that the environment answered with an error
    format_errors: int = 0  # outputs of the policy without a readable action, retries included

    @property
    def selection_loss(self) -> float:
        return self.trajectory_recall - self.recall

    @property
    def tools(self) -> int:
        return len(self.calls)


def measure_outcome(episode: Episode, gold: Gold | None) -> Outcome:
    """Score an episode. One that ended in a policy error delivers nothing by definition, but what it saw counts as
    seen. Raises UsageError: the gold of the task is missing or names nothing to find."""
    wanted = targets(episode.task.task_id, gold, episode.unit)
    ranked = delivery(episode)
    covers = {unit: {unit} for unit in ranked}
    for alias, representative in episode.aliases.items():
        if representative in covers:
            covers[representative].add(alias)
    covered = frozenset[UnitId]().union(*covers.values())
    seen = frozenset(episode.pool) | episode.aliases.keys()
    relevant = frozenset().union(*wanted.relevant)
    judged = match_targets(ranked, wanted.relevant, wanted.grades)
    recall, precision = judged.recall(), judged.precision()
    succeeded = [
        turn.action.name
        for turn in episode.turns
        if turn.action is not None and turn.observation is not None and turn.observation.error is None
    ]
    return Outcome(
        recall=recall,
        precision=precision,
        f1=f_beta(precision, recall, 1.0),
        f2=f_beta(precision, recall, 2.0),
        answer_recall=_recall(frozenset(ranked), wanted.answer),
        recall_alias=_recall(covered, wanted.relevant),
        precision_alias=_share([not relevant.isdisjoint(cover) for cover in covers.values()]),
        answer_recall_alias=_recall(covered, wanted.answer),
        trajectory_recall=_recall(seen, wanted.relevant),
        trajectory_answer_recall=_recall(seen, wanted.answer),
        ranked=measures(judged),
        set_size=judged.size,
        turns=sum(turn.action is not None for turn in episode.turns),
        calls=dict(Counter(name for name in succeeded if name != "end_search")),
        tool_errors=sum(observation.error is not None for observation in episode.observations),
        format_errors=sum(
            max(len({call.attempt for call in turn.calls}) - 1, 0) + (turn.parse_error is not None)
            for turn in episode.turns
        ),
    )


def delivery(episode: Episode) -> tuple[UnitId, ...]:
    """Return the curated set as delivered, each unit once; empty if the policy failed."""
    if episode.status is Status.POLICY_ERROR:
        return ()
    return tuple(dict.fromkeys(entry.unit_id for entry in sorted(episode.curated, key=lambda entry: entry.rank)))


def targets(task_id: str, gold: Gold | None, unit: Unit) -> Targets:
    """Return the targets of a task, in the unit of its corpus. Readers of tasks call it to refuse bad gold early.
    Raises UsageError: there is no gold, nothing in it is relevant, or its facts have no chunks or do not exist."""
    if gold is None:
        raise UsageError(f"task {task_id!r} has no gold: it cannot be scored")
    if unit == "chunk":
        return _fact_targets(task_id, gold)
    grades = {frozenset({UnitId(doc)}): grade for doc, grade in gold.relevant.items() if grade > 0}
    if not grades:
        raise UsageError(f"task {task_id!r} has no relevant document: its recall is undefined")
    answer = tuple(frozenset({UnitId(doc)}) for doc in dict.fromkeys(gold.answer_docs))
    return Targets(tuple(grades), answer or tuple(grades), tuple(grades.values()))


def f_beta(precision: float, recall: float, beta: float) -> float:
    """Return the weighted harmonic mean (1 + b^2) P R / (b^2 P + R) (van Rijsbergen 1979); 0 if P or R is 0."""
    if precision == 0.0 or recall == 0.0:
        return 0.0
    return (1.0 + beta**2) * precision * recall / (beta**2 * precision + recall)


def _fact_targets(task_id: str, gold: Gold) -> Targets:
    facts = tuple(frozenset(UnitId(chunk) for chunk in chunks) for chunks in gold.facts or ())
    if not facts:
        raise UsageError(f"task {task_id!r} has no facts, but its corpus is scored by chunks: its recall is undefined")
    if not all(facts):
        raise UsageError(f"task {task_id!r}: no chunk states fact {facts.index(frozenset())}")
    positions = dict.fromkeys(gold.answer_facts)
    if not all(0 <= position < len(facts) for position in positions):
        raise UsageError(f"task {task_id!r}: answer_facts names a fact beyond the task's {len(facts)}")
    return Targets(facts, tuple(facts[position] for position in positions) or facts, (1,) * len(facts))


def _recall(found: Set[UnitId], wanted: Sequence[Target]) -> float:
    return _share([not target.isdisjoint(found) for target in wanted])


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
