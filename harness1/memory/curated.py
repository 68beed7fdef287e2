"""The curated set: the result of the search, at most `cap` units, each with an importance tag."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness1.config import Curation
from harness1.memory.forkable import Forkable
from harness1.records import TAGS, Curated, Tag, UnitId

DEFAULT_TAG: Tag = "fair"
RANK: dict[Tag, int] = {tag: rank for rank, tag in enumerate(TAGS)}


class Change(msgspec.Struct):
    """The effect of one curation, to be folded into the observation's delta."""

    added: dict[UnitId, Tag] = {}
    retagged: dict[UnitId, Tag] = {}
    removed: list[UnitId] = []
    evicted: list[UnitId] = []
    refused: list[UnitId] = []


class CuratedSet(Forkable):
    """Tags by unit id, in the order in which units were first added."""

    tags: dict[UnitId, Tag] = {}

    def __len__(self) -> int:
        return len(self.tags)

    def __contains__(self, unit_id: object) -> bool:
        return unit_id in self.tags

    def edit(self, additions: dict[UnitId, Tag], removals: list[UnitId], settings: Curation) -> Change:
        """Remove entries, then add others in order; adding a present entry only changes its tag.

        At the cap an entry is evicted only for a strictly more important one (`rank`), or the oldest is (`fifo`), or
        the newcomer is refused (`refuse`).
        """
        change = Change()
        for unit_id in removals:
            if self.tags.pop(unit_id, None) is not None:
                change.removed.append(unit_id)
        for unit_id, tag in additions.items():
            if unit_id in self.tags:
                if self.tags[unit_id] != tag:
                    self.tags[unit_id] = change.retagged[unit_id] = tag
            elif self._make_room(tag, settings, change):
                self.tags[unit_id] = change.added[unit_id] = tag
            else:
                change.refused.append(unit_id)
        # Removing a unit and adding it again in one call only changes its place in the order.
        change.removed = [unit_id for unit_id in change.removed if unit_id not in change.added]
        change.evicted = [unit_id for unit_id in change.evicted if unit_id not in change.added]
        return change

    def refill(self, units: Sequence[UnitId], tag: Tag) -> Change:
        """Replace all entries with these units, in order."""
        before = self.tags
        self.tags = dict.fromkeys(units, tag)
        change = Change(removed=[unit_id for unit_id in before if unit_id not in self.tags])
        change.added = {unit_id: tag for unit_id in units if unit_id not in before}
        return change

    def ranked(self) -> list[Curated]:
        """Return the delivered order: by importance, then by order of addition."""
        order = sorted(self.tags, key=lambda unit_id: RANK[self.tags[unit_id]])
        return [Curated(unit_id, self.tags[unit_id], rank) for rank, unit_id in enumerate(order, start=1)]

    def _make_room(self, tag: Tag, settings: Curation, change: Change) -> bool:
        if len(self.tags) < settings.cap:
            return True
        if settings.eviction == "refuse":
            return False
        victim = next(iter(self.tags))
        if settings.eviction == "rank":
            worst = max(RANK[held] for held in self.tags.values())
            if worst <= RANK[tag]:
                return False
            victim = next(unit_id for unit_id, held in self.tags.items() if RANK[held] == worst)
        del self.tags[victim]
        if change.added.pop(victim, None) is None:
            change.evicted.append(victim)
        else:
            change.refused.append(victim)
        return True
