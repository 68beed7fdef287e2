"""What a finished episode achieved against its gold: computed once, then read by the reward and by every metric."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set

from harness1.errors import UsageError
from harness1.records import Episode, Gold, Record, Status, Turn, Unit, UnitId

DEPTHS = (1, 3, 5, 10, 15, 30)
"""Depths k at which recall of the ranked curated set is taken."""

Target = frozenset[UnitId]
"""Units any one of which is enough: a single document, or the chunks that state one fact."""


class Targets(Record):
    """What an episode should find: everything relevant, and the part of it that holds the final answer."""

    relevant: tuple[Target, ...]
    answer: tuple[Target, ...]


class Outcome(Record, kw_only=True):
    """Shares are in [0, 1] and 0 where the curated set is empty. Curated shares are strict on ids; in the `*_alias`
    variants a curated unit also stands for the near duplicates hidden behind it."""

    recall: float = 0.0
    precision: float = 0.0
    f1: float = 0.0
    f2: float = 0.0
    answer_recall: float = 0.0
    recall_alias: float = 0.0
    precision_alias: float = 0.0
    answer_recall_alias: float = 0.0
    trajectory_recall: float = 0.0
    """Recall of all that was seen: the pool and the near duplicates hidden behind it."""
    trajectory_answer_recall: float = 0.0
    recall_at: dict[int, float] = {}
    """Recall of the first k curated units, for each k of `DEPTHS`."""
    set_size: int = 0
    turns: int = 0
    """Turns with an action; a turn that ended in an unreadable output has none."""
    calls: dict[str, int] = {}
    """Calls of each tool that succeeded: an observation without error. `end_search` is never counted."""
    tool_errors: int = 0
    """Calls that the environment answered with an error."""
    format_errors: int = 0
    """Outputs of the policy from which no action could be read, retries included."""

    @property
    def curate_calls(self) -> int:
        return self.calls.get("curate", 0)

    @property
    def tools(self) -> int:
        """Distinct tools that were used with success."""
        return len(self.calls)


def outcome(episode: Episode, gold: Gold | None) -> Outcome:
    """Score an episode. One that ended in a policy error delivers nothing, by definition: its curated set counts as
    empty, whatever it held; what it saw still counts as seen.

    Raises:
        UsageError: the gold of the task is missing or names nothing to find.
    """
    wanted = targets(episode.task.task_id, gold, episode.unit)
    ranked = () if episode.status is Status.POLICY_ERROR else _ranked(episode)
    covers = _covers(ranked, episode.aliases)
    curated, covered = frozenset(ranked), frozenset().union(*covers)
    seen = frozenset(episode.pool) | episode.aliases.keys()
    relevant = frozenset().union(*wanted.relevant)
    recall, precision = _recall(curated, wanted.relevant), _share([unit in relevant for unit in ranked])
    return Outcome(
        recall=recall,
        precision=precision,
        f1=f_beta(precision, recall, 1.0),
        f2=f_beta(precision, recall, 2.0),
        answer_recall=_recall(curated, wanted.answer),
        recall_alias=_recall(covered, wanted.relevant),
        precision_alias=_share([not relevant.isdisjoint(cover) for cover in covers]),
        answer_recall_alias=_recall(covered, wanted.answer),
        trajectory_recall=_recall(seen, wanted.relevant),
        trajectory_answer_recall=_recall(seen, wanted.answer),
        recall_at=_recall_at(ranked, wanted.relevant),
        set_size=len(ranked),
        turns=sum(turn.action is not None for turn in episode.turns),
        calls=_calls(episode.turns),
        tool_errors=sum(turn.observation is not None and turn.observation.error is not None for turn in episode.turns),
        format_errors=sum(map(_format_errors, episode.turns)),
    )


def targets(task_id: str, gold: Gold | None, unit: Unit) -> Targets:
    """What there is to find for a task, in the unit of its corpus. Readers of tasks call it to refuse bad gold early.

    Raises:
        UsageError: there is no gold, or nothing relevant in it, or its facts cannot be found or do not exist.
    """
    if gold is None:
        raise UsageError(f"task {task_id!r} has no gold: it cannot be scored")
    return _fact_targets(task_id, gold) if unit == "chunk" else _document_targets(task_id, gold)


def f_beta(precision: float, recall: float, beta: float) -> float:
    """The weighted harmonic mean (1 + b^2) P R / (b^2 P + R) (van Rijsbergen 1979); 0 where both are 0."""
    if precision == 0.0 or recall == 0.0:
        return 0.0
    return (1.0 + beta**2) * precision * recall / (beta**2 * precision + recall)


def _document_targets(task_id: str, gold: Gold) -> Targets:
    relevant = tuple(frozenset({UnitId(doc)}) for doc, grade in gold.relevant.items() if grade > 0)
    if not relevant:
        raise UsageError(f"task {task_id!r} has no relevant document: its recall is undefined")
    return Targets(relevant, tuple(frozenset({UnitId(doc)}) for doc in dict.fromkeys(gold.answer_docs)) or relevant)


def _fact_targets(task_id: str, gold: Gold) -> Targets:
    facts = tuple(frozenset(UnitId(chunk) for chunk in chunks) for chunks in gold.facts or ())
    if not facts:
        raise UsageError(f"task {task_id!r} has no facts, but its corpus is scored by chunks: its recall is undefined")
    if not all(facts):
        raise UsageError(f"task {task_id!r}: fact {facts.index(frozenset())} is stated by no chunk")
    positions = dict.fromkeys(gold.answer_facts)
    if not all(0 <= position < len(facts) for position in positions):
        raise UsageError(f"task {task_id!r}: answer_facts names a fact beyond the {len(facts)} that it has")
    return Targets(facts, tuple(facts[position] for position in positions) or facts)


def _ranked(episode: Episode) -> tuple[UnitId, ...]:
    return tuple(entry.unit_id for entry in sorted(episode.curated, key=lambda entry: entry.rank))


def _covers(ranked: Sequence[UnitId], aliases: dict[UnitId, UnitId]) -> list[set[UnitId]]:
    """For each curated unit, itself and the near duplicates that it represents."""
    covers = {unit: {unit} for unit in ranked}
    for alias, representative in aliases.items():
        if representative in covers:
            covers[representative].add(alias)
    return list(covers.values())


def _recall(found: Set[UnitId], wanted: Sequence[Target]) -> float:
    return _share([not target.isdisjoint(found) for target in wanted])


def _recall_at(ranked: Sequence[UnitId], wanted: Sequence[Target]) -> dict[int, float]:
    """One pass for all depths: a target is found at depth k if its best placed member stands there or above."""
    place = {unit: position for position, unit in enumerate(ranked, start=1)}
    first = [min((place[unit] for unit in target if unit in place), default=math.inf) for target in wanted]
    return {depth: _share([position <= depth for position in first]) for depth in DEPTHS}


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _calls(turns: Sequence[Turn]) -> dict[str, int]:
    return dict(
        Counter(
            turn.action.name
            for turn in turns
            if turn.action is not None and turn.action.name != "end_search"
            if turn.observation is not None and turn.observation.error is None
        )
    )


def _format_errors(turn: Turn) -> int:
    """Every attempt but the last of a turn failed; the last one did where the turn kept a parse error."""
    return max(len({call.attempt for call in turn.calls}) - 1, 0) + (turn.parse_error is not None)
