"""Compare an action with the expert's by what each leads to from the same state. No words are compared and no model
judges: both actions are carried out for one step, and the changes are counted against the gold.

Each rule decides on some actions, and finds them right under a condition:

- `unreadable`: an output without an action. Never right.
- `error`: an action that the environment answers with an error. Never right.
- `stop`: an end of the search, whatever the expert did. Right if the curated set has the recall of the expert's final
  set, within a tolerance, and few more useless documents.
- `evidence`: a discovery where the expert's discovery surfaced evidence. Right if it surfaces as much.
- `fresh`: a discovery where the expert's surfaced none. Right if it asks something new and finds something, or shows
  gold, as a full read does; if the expert's showed gold, it must show gold.
- `curation`: a curation where the expert curated. Right if it gains as much recall, loses none, and leaves few more
  useless documents.
- `verify`, `review_docs`: the same tool as the expert's. Right if it confirms or shows gold and misjudges no more
  documents.
- `other`: a different kind of action than the expert's. Right if it surfaces or curates evidence, and as much as the
  expert did; or if it prunes the curated set where the expert did neither.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness1.config import Pivots
from harness1.hashing import canonical
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Observation, Record, ToolCall, Turn, UnitId
from harness1.reward.measures import Target
from harness1.tools.documents import END_SEARCH
from harness1.tools.registry import Toolbox

REVISION = 1
"""Raised whenever a rule decides differently: profiles made under another revision are refused."""
DISCOVERY, CURATION = "discovery", "curation"
"""Kinds of actions; every other tool is a kind of its own."""


class Ruling(Record):
    """The rule that decided on an action, and its decision."""

    rule: str
    right: bool


class SetQuality(Record):
    """The recall of a curated set, and the number of its documents that serve no target."""

    recall: float
    useless: int


class Effect(Record, kw_only=True):
    """The changes that one action made. Evidence is counted in targets: relevant documents, or facts."""

    kind: str
    failed: bool = False
    fresh: bool = False
    """It asked something new; a curation changed something."""
    found: bool = False
    """It showed text that had not been found before, or relevant documents."""
    surfaced: int = 0
    """Targets seen for the first time."""
    gained: int = 0
    """Targets that became curated."""
    lost: int = 0
    """Targets that were curated and no longer are."""
    gold: int = 0
    """Relevant documents that a verdict confirmed, or that were shown."""
    misjudged: int = 0
    """Useless documents that a verdict confirmed, and relevant ones that it denied."""
    before: SetQuality
    after: SetQuality


@dataclass(frozen=True)
class DecisionPoint:
    """The state in which actions are compared.

    Attributes:
        memory: the memory before the actions; it is never changed.
        wanted: the targets of the task.
        earlier: the actions of the episode so far.
    """

    memory: WorkingMemory
    wanted: tuple[Target, ...]
    earlier: tuple[ToolCall, ...]
    toolbox: Toolbox

    def effect(self, turn: Turn, after: WorkingMemory) -> Effect:
        """Return the effect of an action, given the turn that recorded it and the memory that it left.

        Raises:
            ValueError: the turn has no action.
        """
        if turn.action is None or turn.observation is None:
            raise ValueError("a turn without an action has no effect")
        before, seen = self._served(_seen(self.memory)), self._served(_seen(after))
        held, holds = self._served(self.memory.curated.tags), self._served(after.curated.tags)
        gold, misjudged = self._gold_shown(turn.observation, after)
        return Effect(
            kind=self._kind(turn.action.name),
            failed=turn.observation.error is not None,
            fresh=self._is_fresh(turn.action, turn.observation, after),
            found=gold > 0 or after.store.keys() != self.memory.store.keys(),
            surfaced=len(seen - before),
            gained=len(holds - held),
            lost=len(held - holds),
            gold=gold,
            misjudged=misjudged,
            before=set_quality(self.memory.curated.tags, self.wanted),
            after=set_quality(after.curated.tags, self.wanted),
        )

    def _kind(self, tool: str) -> str:
        traits = self.toolbox.traits(tool)
        return DISCOVERY if traits.discovers else CURATION if traits.curates else tool

    def _served(self, units: Collection[UnitId]) -> set[int]:
        """Return the positions of the targets that some of the units serve."""
        return {position for position, target in enumerate(self.wanted) if not target.isdisjoint(units)}

    def _is_fresh(self, action: ToolCall, seen: Observation, after: WorkingMemory) -> bool:
        if self.toolbox.traits(action.name).curates:
            return list(self.memory.curated.tags.items()) != list(after.curated.tags.items())
        if seen.verdicts:
            return not all(verdict.cached for verdict in seen.verdicts)
        return _folded(action) not in map(_folded, self.earlier)

    def _gold_shown(self, seen: Observation, after: WorkingMemory) -> tuple[int, int]:
        """Count the relevant documents that verdicts confirmed, or else that were shown, and the misjudgements."""
        relevant = _relevant(self.wanted)
        if not seen.verdicts:
            return len({after.pool.unit_of(hit) for hit in seen.hits} & relevant), 0
        judged = [(each.unit_id in relevant, each.label) for each in seen.verdicts if not each.cached]
        return judged.count((True, "yes")), judged.count((False, "yes")) + judged.count((True, "no"))


def set_quality(units: Collection[UnitId], wanted: Sequence[Target]) -> SetQuality:
    """Measure a set of units against the targets."""
    relevant = _relevant(wanted)
    recall = sum(not target.isdisjoint(units) for target in wanted) / len(wanted)
    return SetQuality(recall, sum(unit not in relevant for unit in units))


def compare_effects(act: Effect, expert: Effect, end: SetQuality, settings: Pivots) -> Ruling:
    """Decide if an action is as good as the expert's in the same state.

    Args:
        end: the quality of the set that the expert delivered.
    """
    if act.failed:
        return Ruling("error", False)
    if act.kind == END_SEARCH:
        return Ruling("stop", _may_stop(act.after, end, settings))
    if act.kind != expert.kind:
        return Ruling("other", _is_as_good(act, expert, settings))
    if act.kind == DISCOVERY:
        if expert.surfaced:
            return Ruling("evidence", act.surfaced >= expert.surfaced)
        return Ruling("fresh", act.fresh and act.found and act.gold >= min(1, expert.gold))
    if act.kind == CURATION:
        return Ruling("curation", _curates_as_well(act, expert, settings))
    return Ruling(act.kind, act.fresh and act.gold > 0 and act.misjudged <= expert.misjudged)


def _may_stop(held: SetQuality, end: SetQuality, settings: Pivots) -> bool:
    return held.recall >= end.recall - settings.slack and held.useless <= end.useless + settings.useless


def _curates_as_well(act: Effect, expert: Effect, settings: Pivots) -> bool:
    """Compare two curations. Useless documents are the price of recall: none are tolerated where the expert gains
    nothing, as when it prunes."""
    tolerated = settings.useless if expert.gained else 0
    kept = not act.lost and act.gained >= expert.gained
    return act.fresh and kept and act.after.useless <= expert.after.useless + tolerated


def _is_as_good(act: Effect, expert: Effect, settings: Pivots) -> bool:
    """Compare actions of different kinds."""
    theirs = _progress(expert, settings)
    prunes = act.kind == CURATION and not act.lost and act.after.useless < act.before.useless
    return _progress(act, settings) >= max(1, theirs) or (not theirs and prunes)


def _progress(effect: Effect, settings: Pivots) -> int:
    """Count the targets that a discovery surfaced, or that a curation gained without losses or many useless ones."""
    if effect.kind == DISCOVERY:
        return effect.surfaced
    if effect.kind != CURATION or effect.lost or effect.after.useless > effect.before.useless + settings.useless:
        return 0
    return effect.gained


def _relevant(wanted: Sequence[Target]) -> frozenset[UnitId]:
    return frozenset[UnitId]().union(*wanted)


def _seen(memory: WorkingMemory) -> set[UnitId]:
    """Return the units that recall of the trajectory counts: pooled ones, and near duplicates of those."""
    return memory.pool.entries.keys() | memory.pool.aliases.keys()


def _folded(action: ToolCall) -> bytes:
    """Encode a call without case and white space, in which equal questions may differ."""
    return b" ".join(canonical([action.name, action.arguments]).lower().split())
