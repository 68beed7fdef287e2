"""The outcome of a finished episode, measured against its gold once and then read by the reward and by every metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from harness1.errors import UsageError
from harness1.records import Episode, Gold, Record, Status, Turn, Unit, UnitId
from harness1.reward.ranking import Target, Wanted, graded, match_targets, measures


class Targets(Record):
    """The targets of an episode: everything relevant, and the part that holds the final answer."""

    relevant: tuple[Target, ...]
    answer: tuple[Target, ...]
    grades: tuple[int, ...]
    """Grade of each relevant target; 1 for facts."""


class Outcome(Record, kw_only=True):
    """The outcome of an episode. Shares are in [0, 1], and 0 if the curated set is empty. Curated shares match exact
    ids; in the `*_alias` variants a curated unit also counts for the near duplicates that it represents."""

    recall: float = 0.0
    precision: float = 0.0
    f1: float = 0.0
    f2: float = 0.0
    answer_recall: float = 0.0
    recall_alias: float = 0.0
    precision_alias: float = 0.0
    answer_recall_alias: float = 0.0
    trajectory_recall: float = 0.0
    """Recall of everything seen: the pool and the near duplicates that its units represent."""
    trajectory_answer_recall: float = 0.0
    ranked: dict[str, float] = {}
    """Measures of the curated set's order, by their name in `ranking.MEASURES`."""
    set_size: int = 0
    turns: int = 0
    """Turns with an action; a turn that ended in unreadable output has none."""
    calls: dict[str, int] = {}
    """Successful calls of each tool (an observation without error), except `end_search`."""
    tool_errors: int = 0
    """Calls that the environment answered with an error."""
    format_errors: int = 0
    """Outputs of the policy without a readable action, retries included."""

    @property
    def selection_loss(self) -> float:
        """Trajectory recall minus curated recall."""
        return self.trajectory_recall - self.recall

    @property
    def curate_calls(self) -> int:
        return self.calls.get("curate", 0)

    @property
    def tools(self) -> int:
        """Number of distinct tools used successfully."""
        return len(self.calls)


def outcome(episode: Episode, gold: Gold | None) -> Outcome:
    """Score an episode. One that ended in a policy error delivers nothing by definition: its curated set counts as
    empty, but what it saw counts as seen.

    Raises:
        UsageError: the gold of the task is missing or names nothing to find.
    """
    wanted = targets(episode.task.task_id, gold, episode.unit)
    ranked = delivered(episode)
    covers = _covers(ranked, episode.aliases)
    covered = frozenset[UnitId]().union(*covers)
    seen = frozenset(episode.pool) | episode.aliases.keys()
    relevant = frozenset().union(*wanted.relevant)
    judged = match_targets(ranked, Wanted(wanted.relevant, wanted.grades))
    recall, precision = judged.recall(), judged.precision()
    return Outcome(
        recall=recall,
        precision=precision,
        f1=f_beta(precision, recall, 1.0),
        f2=f_beta(precision, recall, 2.0),
        answer_recall=_recall(frozenset(ranked), wanted.answer),
        recall_alias=_recall(covered, wanted.relevant),
        precision_alias=_share([not relevant.isdisjoint(cover) for cover in covers]),
        answer_recall_alias=_recall(covered, wanted.answer),
        trajectory_recall=_recall(seen, wanted.relevant),
        trajectory_answer_recall=_recall(seen, wanted.answer),
        ranked=measures(judged),
        set_size=judged.size,
        turns=sum(turn.action is not None for turn in episode.turns),
        calls=_calls(episode.turns),
        tool_errors=sum(observation.error is not None for observation in episode.observations),
        format_errors=sum(map(_format_errors, episode.turns)),
    )


def delivered(episode: Episode) -> tuple[UnitId, ...]:
    """Return the curated set in the order of delivery, empty if the policy's failure ended the episode. A unit that the
    record names twice counts at its first place."""
    if episode.status is Status.POLICY_ERROR:
        return ()
    return tuple(dict.fromkeys(entry.unit_id for entry in sorted(episode.curated, key=lambda entry: entry.rank)))


def targets(task_id: str, gold: Gold | None, unit: Unit) -> Targets:
    """Return the targets of a task, in the unit of its corpus. Readers of tasks call it to refuse bad gold early.

    Raises:
        UsageError: there is no gold, nothing in it is relevant, or its facts have no chunks or do not exist.
    """
    if gold is None:
        raise UsageError(f"task {task_id!r} has no gold: it cannot be scored")
    return _fact_targets(task_id, gold) if unit == "chunk" else _document_targets(task_id, gold)


def f_beta(precision: float, recall: float, beta: float) -> float:
    """Return the weighted harmonic mean (1 + b^2) P R / (b^2 P + R) (van Rijsbergen 1979); 0 if P or R is 0."""
    if precision == 0.0 or recall == 0.0:
        return 0.0
    return (1.0 + beta**2) * precision * recall / (beta**2 * precision + recall)


def _document_targets(task_id: str, gold: Gold) -> Targets:
    relevant, grades = graded({UnitId(doc): grade for doc, grade in gold.relevant.items()})
    if not relevant:
        raise UsageError(f"task {task_id!r} has no relevant document: its recall is undefined")
    answer = tuple(frozenset({UnitId(doc)}) for doc in dict.fromkeys(gold.answer_docs))
    return Targets(relevant, answer or relevant, grades)


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


def _covers(ranked: Sequence[UnitId], aliases: dict[UnitId, UnitId]) -> list[set[UnitId]]:
    """Return, for each curated unit, the set of itself and the near duplicates that it represents."""
    covers = {unit: {unit} for unit in ranked}
    for alias, representative in aliases.items():
        if representative in covers:
            covers[representative].add(alias)
    return list(covers.values())


def _recall(found: Set[UnitId], wanted: Sequence[Target]) -> float:
    return _share([not target.isdisjoint(found) for target in wanted])


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _calls(turns: Sequence[Turn]) -> dict[str, int]:
    succeeded = [turn for turn in turns if turn.observation is not None and turn.observation.error is None]
    names = (turn.action.name for turn in succeeded if turn.action is not None)
    return dict(Counter(name for name in names if name != "end_search"))


def _format_errors(turn: Turn) -> int:
    """Count the failed attempts of a turn: all but the last, and the last as well if the turn kept a parse error."""
    return max(len({call.attempt for call in turn.calls}) - 1, 0) + (turn.parse_error is not None)
