"""What one turn changed in the working memory, as a difference between two looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness1.memory.working_memory import WorkingMemory
from harness1.records import TAGS, Delta, Tag, UnitId
from harness1.viewer.tables import Tables

MOST_BRIDGES = 60
"""Entities that the graph of an episode holds, those in the most documents first."""
LISTED_BRIDGES = 40
"""New bridges of one turn that are named; the others are counted."""


@dataclass(frozen=True)
class Look:
    """A memory at one moment, as far as differences are made of it."""

    curated: Mapping[UnitId, Tag]
    pool: frozenset[UnitId]
    aliases: Mapping[UnitId, UnitId]
    verdicts: frozenset[str]
    bridges: Mapping[str, int]
    """Key of each entity in at least two units, with how many."""

    @classmethod
    def at(cls, memory: WorkingMemory) -> Look:
        """A copy, which later turns do not touch."""
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
        """How much of everything there is."""
        return {
            "curated": len(self.curated),
            "pool": len(self.pool),
            "aliases": len(self.aliases),
            "verdicts": len(self.verdicts),
            "bridges": len(self.bridges),
        }


def tag_number(tag: Tag) -> int:
    """A tag by its place in `TAGS`."""
    return TAGS.index(tag)


def change(before: Look, now: Look, memory: WorkingMemory, delta: Delta, tables: Tables) -> dict[str, Any]:
    """The difference between two looks at a memory, units by number; what is empty is left out.

    Args:
        memory: at the later look.
        delta: of the action between them: it tells an eviction from a removal.
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


def _bridges(before: Look, now: Look, memory: WorkingMemory, tables: Tables) -> dict[str, Any]:
    """The entities that came to link documents in this turn, and the documents that they link; most first."""
    names = memory.evidence.names
    new = [key for key in now.bridges if key not in before.bridges]
    new.sort(key=lambda key: (-now.bridges[key], names[key]))
    if not new:
        return {}
    listed = [[names[key], [tables.unit(each) for each in memory.evidence.units[key]]] for key in new[:LISTED_BRIDGES]]
    return {"bridges": listed, "bridges_total": len(new)}


class EvidenceGrowth:
    """When each entity came to link each document, over an episode."""

    def __init__(self) -> None:
        self._links: dict[str, list[tuple[UnitId, int]]] = {}

    def note(self, before: Look, memory: WorkingMemory, turn: int) -> None:
        """Take in what a turn added."""
        for size, keys in memory.evidence.levels.items():
            for key in keys:
                if (known := before.bridges.get(key, 0)) < size:
                    links = self._links.setdefault(key, [])
                    links += [(each, turn) for each in memory.evidence.units[key][known:]]

    def plain(self, memory: WorkingMemory, tables: Tables) -> list[Any]:
        """`[entity, [[unit, turn], ...]]` for the entities in the most documents at the end."""
        keys = sorted(self._links, key=lambda key: (-len(self._links[key]), memory.evidence.names[key]))
        return [
            [memory.evidence.names[key], [[tables.unit(each), turn] for each, turn in self._links[key]]]
            for key in keys[:MOST_BRIDGES]
        ]
