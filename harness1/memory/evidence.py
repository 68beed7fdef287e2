"""The evidence graph: which units mention which entities, kept so that no turn has to sort it again."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Self

from harness1.memory.forkable import Forkable
from harness1.records import Record, UnitId


class Bridge(Record, frozen=True):
    """An entity in two or more units. `unit_ids` may be cut; `total` counts them all."""

    entity: str
    unit_ids: tuple[UnitId, ...]
    total: int


class EvidenceGraph(Forkable):
    """The entities and units of an episode, linked both ways, as plain data.

    Entities that differ only in case, in the dots of an acronym or in a possessive ending are one; the form seen first
    is shown. The fields are an index to read through the methods; only `add` writes them.
    """

    names: dict[str, str] = {}
    """Key of an entity -> the form seen first."""
    units: dict[str, tuple[UnitId, ...]] = {}
    """Key of an entity -> the units that mention it, in order of addition."""
    entities: dict[UnitId, tuple[str, ...]] = {}
    """Unit -> the keys of its entities, in order of addition."""
    levels: dict[int, dict[str, None]] = {}
    """Number of units, from 2 -> the keys of the entities in that many units."""

    def add(self, unit_id: UnitId, entities: Iterable[str]) -> None:
        """Record that a unit mentions some entities. May be called again for more text of the same unit."""
        keys = dict.fromkeys(self.entities.get(unit_id, ()))
        alone = (unit_id,)
        for name in entities:
            key = entity_key(name)
            if not key or key in keys:
                continue
            keys[key] = None
            before = self.units.get(key)
            if before is None:
                self.names[key], self.units[key] = name, alone
            else:
                self._link(key, before, unit_id)
        self.entities[unit_id] = tuple(keys)

    def bridges(self, limit: int, documents: int | None = None) -> list[Bridge]:
        """Return the entities in the most units (two at least), by decreasing number of units, then by name. Each comes
        with its first `documents` units, or all."""
        keys: list[str] = []
        for level in sorted(self.levels, reverse=True):
            if len(keys) >= limit:
                break
            keys += nsmallest(limit - len(keys), self.levels[level], key=self.names.__getitem__)
        return [Bridge(self.names[key], self.units[key][:documents], len(self.units[key])) for key in keys]

    @property
    def singletons(self) -> int:
        """Return the number of entities in exactly one unit: possible next hops."""
        return len(self.units) - sum(map(len, self.levels.values()))

    def entities_of(self, unit_id: UnitId) -> tuple[str, ...]:
        """Return the entities of a unit in order of addition; none for an unknown unit."""
        return tuple(self.names[key] for key in self.entities.get(unit_id, ()))

    def units_of(self, entity: str) -> tuple[UnitId, ...]:
        """Return the units that mention an entity in any form, in order of addition."""
        return self.units.get(entity_key(entity), ())

    def fork(self) -> Self:
        """Return an independent copy, as every `Forkable` does; the levels are dictionaries of dictionaries."""
        forked = super().fork()
        forked.levels = {count: keys.copy() for count, keys in self.levels.items()}
        return forked

    def _link(self, key: str, before: tuple[UnitId, ...], unit_id: UnitId) -> None:
        """Add a unit to a known entity, which moves to the next level."""
        self.units[key] = (*before, unit_id)
        if len(before) > 1:
            level = self.levels[len(before)]
            del level[key]
            if not level:
                del self.levels[len(before)]
        self.levels.setdefault(len(before) + 1, {})[key] = None


def entity_key(name: str) -> str:
    """Return what all forms of an entity share: case, dots of acronyms and possessive endings are folded."""
    key = name.casefold()
    if "." in key or "'" in key or "’" in key:
        key = key.replace(".", "").replace("’", "'").strip().removesuffix("'s").removesuffix("'")
    return key
