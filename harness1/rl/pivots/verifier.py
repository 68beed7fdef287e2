"""Whether an action is as good as the expert's, by what each leads to from the same state. No words are compared, and
no model judges: both actions are carried out for one step, and what they changed is counted against the gold.

The rules, each with what it decides about, and when that is right:

- `unreadable`: an output without an action. Never.
- `error`: an action that the environment answers with an error. Never.
- `stop`: the end of the search, whatever the expert did. The curated set has the recall that the expert delivered in
  the end, and hardly more that is useless.
- `evidence`: a discovery beside one that surfaced evidence. It surfaces as much.
- `fresh`: a discovery beside one that surfaced none. It asks what was not asked and finds something, or shows gold, as
  a document that is read in full; gold it must be where the expert's showed some.
- `curation`: a curation beside a curation. It gains as much recall, loses none, and leaves hardly more that is useless.
- `verify`, `review_docs`: the same beside the same. It confirms gold, or shows it, and misjudges no more documents.
- `other`: an action of another kind than the expert's. It surfaces evidence, or curates it, and as much as the expert
  did; or it prunes the curated set where the expert did neither.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness1.config import Pivots
from harness1.hashing import canonical
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Observation, Record, ToolCall, Turn, UnitId
from harness1.reward.ranking import Target
from harness1.tools.end_search import END_SEARCH
from harness1.tools.registry import Toolbox

REVISION = 1
"""Counted up whenever a rule decides otherwise: profiles of other revisions are not used."""
DISCOVERY, CURATION = "discovery", "curation"
"""Kinds of actions; every other tool is a kind of its own."""


class Ruling(Record):
    """Which rule decided about an action, and how."""

    rule: str
    right: bool


class Standing(Record):
    """What a curated set is worth: its recall, and how many of its documents serve nothing."""

    recall: float
    useless: int


class Effect(Record, kw_only=True):
    """What one action did. Evidence is counted in targets: relevant documents, or facts."""

    kind: str
    failed: bool = False
    fresh: bool = False
    """It asked what had not been asked; of a curation: it changed something."""
    found: bool = False
    """It showed text that had not been found before, or relevant documents."""
    surfaced: int = 0
    """Targets seen for the first time."""
    gained: int = 0
    """Targets curated that were not."""
    lost: int = 0
    """Targets curated before and no more."""
    gold: int = 0
    """Relevant documents that a verdict confirmed, or that were shown."""
    misjudged: int = 0
    """Useless documents that a verdict confirmed, and relevant ones that it denied."""
    before: Standing
    after: Standing


@dataclass(frozen=True)
class Situation:
    """The state that actions are compared in.

    Attributes:
        memory: as it is before them; it is not changed.
        wanted: what there is to find.
        earlier: what was done until then.
    """

    memory: WorkingMemory
    wanted: tuple[Target, ...]
    earlier: tuple[ToolCall, ...]
    toolbox: Toolbox

    def effect(self, turn: Turn, after: WorkingMemory) -> Effect:
        """What an action did, by the turn that it became and the memory that it left.

        Raises:
            ValueError: the turn has no action.
        """
        if turn.action is None or turn.observation is None:
            raise ValueError("a turn without an action has no effect")
        before, seen = self._served(_seen(self.memory)), self._served(_seen(after))
        held, holds = self._served(self.memory.curated.tags), self._served(after.curated.tags)
        gold, misjudged = self._looked(turn.observation, after)
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
            before=standing(self.memory.curated.tags, self.wanted),
            after=standing(after.curated.tags, self.wanted),
        )

    def _kind(self, tool: str) -> str:
        traits = self.toolbox.traits(tool)
        return DISCOVERY if traits.discovers else CURATION if traits.curates else tool

    def _served(self, units: Collection[UnitId]) -> set[int]:
        """The targets that some of the units serve."""
        return {place for place, target in enumerate(self.wanted) if not target.isdisjoint(units)}

    def _is_fresh(self, action: ToolCall, seen: Observation, after: WorkingMemory) -> bool:
        traits = self.toolbox.traits(action.name)
        if traits.curates:
            return list(self.memory.curated.tags.items()) != list(after.curated.tags.items())
        if seen.verdicts:
            return not all(verdict.cached for verdict in seen.verdicts)
        return _folded(action) not in map(_folded, self.earlier)

    def _looked(self, seen: Observation, after: WorkingMemory) -> tuple[int, int]:
        """Of verdicts: relevant documents confirmed, and misjudgements; of other hits: relevant documents shown."""
        relevant = frozenset[UnitId]().union(*self.wanted)
        if not seen.verdicts:
            return len({after.pool.unit_of(hit) for hit in seen.hits} & relevant), 0
        judged = [(each.unit_id in relevant, each.label) for each in seen.verdicts if not each.cached]
        return judged.count((True, "yes")), judged.count((False, "yes")) + judged.count((True, "no"))


def standing(units: Collection[UnitId], wanted: Sequence[Target]) -> Standing:
    """What a set of units is worth."""
    relevant = frozenset[UnitId]().union(*wanted)
    recall = sum(not target.isdisjoint(units) for target in wanted) / len(wanted)
    return Standing(recall, sum(unit not in relevant for unit in units))


def judge(act: Effect, expert: Effect, end: Standing, settings: Pivots) -> Ruling:
    """Whether an action is as good as the expert's, both from the same state.

    Args:
        end: what the expert delivered in the end.
    """
    if act.failed:
        return Ruling("error", False)
    if act.kind == END_SEARCH:
        return Ruling("stop", _is_end(act.after, end, settings))
    if act.kind != expert.kind:
        return Ruling("other", _is_as_good(act, expert, settings))
    if act.kind == DISCOVERY:
        if expert.surfaced:
            return Ruling("evidence", act.surfaced >= expert.surfaced)
        return Ruling("fresh", act.fresh and act.found and act.gold >= min(1, expert.gold))
    if act.kind == CURATION:
        return Ruling("curation", _curates_as_well(act, expert, settings))
    return Ruling(act.kind, act.fresh and act.gold > 0 and act.misjudged <= expert.misjudged)


def _is_end(held: Standing, end: Standing, settings: Pivots) -> bool:
    return held.recall >= end.recall - settings.slack and held.useless <= end.useless + settings.useless


def _curates_as_well(act: Effect, expert: Effect, settings: Pivots) -> bool:
    """Useless documents are a price of recall: where the expert gains none, as when it prunes, none are granted."""
    granted = settings.useless if expert.gained else 0
    kept = not act.lost and act.gained >= expert.gained
    return act.fresh and kept and act.after.useless <= expert.after.useless + granted


def _is_as_good(act: Effect, expert: Effect, settings: Pivots) -> bool:
    """Of an action of another kind."""
    theirs = _progress(expert, settings)
    ours = _progress(act, settings)
    prunes = act.kind == CURATION and not act.lost and act.after.useless < act.before.useless
    return ours >= max(1, theirs) or (not theirs and prunes)


def _progress(effect: Effect, settings: Pivots) -> int:
    """The targets that an action brought forward: that a discovery surfaced, that a clean curation gained."""
    if effect.kind == DISCOVERY:
        return effect.surfaced
    if effect.kind != CURATION or effect.lost or effect.after.useless > effect.before.useless + settings.useless:
        return 0
    return effect.gained


def _seen(memory: WorkingMemory) -> set[UnitId]:
    """As recall of the trajectory counts it: pooled, or a near duplicate of what is."""
    return memory.pool.entries.keys() | memory.pool.aliases.keys()


def _folded(action: ToolCall) -> bytes:
    """A call without what makes no other question of it: case and white space."""
    return b" ".join(canonical([action.name, action.arguments]).lower().split())
