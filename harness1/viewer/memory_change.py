"""The change of the working memory in one turn, as the difference between its states before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness1.memory.working_memory import WorkingMemory
from harness1.records import TAGS, Delta, Tag, UnitId
from harness1.viewer.tables import Tables

LISTED_BRIDGES = 40
"""Limit of new bridges of a turn that are listed; the others are counted."""


@dataclass(frozen=True)
class StateView:
    """The compared parts of a memory at one moment."""

    curated: Mapping[UnitId, Tag]
    pool: frozenset[UnitId]
    aliases: Mapping[UnitId, UnitId]
    verdicts: frozenset[str]
    bridges: Mapping[str, int]
    """The number of units of each entity that is in at least two, by its key."""

    @classmethod
    def at(cls, memory: WorkingMemory) -> StateView:
        """Return a copy that later turns do not change."""
        evidence = memory.evidence
        return cls(
            dict(memory.curated.tags),
            frozenset(memory.pool.entries),
            dict(memory.pool.aliases),
            frozenset(memory.verification.verdicts),
            {key: size for size, keys in evidence.levels.items() for key in keys},
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each part."""
        return {name: len(getattr(self, name)) for name in ("curated", "pool", "aliases", "verdicts", "bridges")}


def tag_number(tag: Tag) -> int:
    """Return the index of a tag in `TAGS`."""
    return TAGS.index(tag)


def change(before: StateView, now: StateView, memory: WorkingMemory, delta: Delta, tables: Tables) -> dict[str, Any]:
    """Return the difference between two states of a memory, with units as numbers and without empty parts.

    Args:
        memory: the memory in the later state.
        delta: the delta of the action, which distinguishes evictions from removals.
    """
    gone = [unit for unit in before.curated if unit not in now.curated]
    evicted = set(delta.evicted)
    unit = tables.unit
    found = {
        "added": [[unit(each), tag_number(tag)] for each, tag in now.curated.items() if each not in before.curated],
        "retagged": [
            [unit(each), tag_number(before.curated[each]), tag_number(tag)]
            for each, tag in now.curated.items()
            if before.curated.get(each, tag) != tag
        ],
        "removed": [unit(each) for each in gone if each not in evicted],
        "evicted": [unit(each) for each in gone if each in evicted],
        "refused": [unit(each) for each in delta.refused],
        "pooled": [unit(each) for each in memory.pool.entries if each not in before.pool],
        "hidden": [[unit(each), unit(twin)] for each, twin in now.aliases.items() if before.aliases.get(each) != twin],
        "shown": [unit(each) for each in before.aliases if each not in now.aliases],
        "verdicts": [
            [unit(verdict.unit_id), verdict.claim, verdict.label]
            for key, verdict in memory.verification.verdicts.items()
            if key not in before.verdicts
        ],
    }
    return {name: rows for name, rows in found.items() if rows} | _bridges(before, now, memory, tables)


def _bridges(before: StateView, now: StateView, memory: WorkingMemory, tables: Tables) -> dict[str, Any]:
    """Return the entities that first link documents in this turn, with the documents; most documents first."""
    names = memory.evidence.names
    new = [key for key in now.bridges if key not in before.bridges]
    new.sort(key=lambda key: (-now.bridges[key], names[key]))
    if not new:
        return {}
    listed = [[names[key], [tables.unit(each) for each in memory.evidence.units[key]]] for key in new[:LISTED_BRIDGES]]
    return {"bridges": listed, "bridges_total": len(new)}
