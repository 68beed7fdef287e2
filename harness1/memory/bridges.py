"""Bridges: units that link the names of a question, and rare names that the best units share with other documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from harness1.memory.entity_handles import mentions
from harness1.memory.evidence import Bridge, entity_key
from harness1.memory.question import SCANNED_CHARACTERS, head, normalised_name, read_question
from harness1.memory.working_memory import WorkingMemory
from harness1.records import UnitId

BEST = 10
"""Units at the top of the evidence order whose names are compared with those of all others."""


class BridgeDocument(NamedTuple):
    """A unit, and the names of the question that it links, in the question's order: two at least."""

    unit_id: UnitId
    names: tuple[str, ...]


def bridge_documents(memory: WorkingMemory, order: Sequence[UnitId], limit: int) -> list[BridgeDocument]:
    """Return the units that link names of the question: those with the most names first, then by evidence.

    A unit covers the names that its title or its text has. If it covers one and has none as its title, it also links
    the names whose own units name it. (In Harness-1, arXiv 2606.02373, a bridge document has two frequent entities;
    names of the question say more than frequency.)

    Args:
        order: the pooled units, the best first.
    """
    names = question_names(memory.query)
    if len(names) < 2:
        return []
    titled = _Titles(memory)
    links: dict[UnitId, set[str]] = {}
    for name in names:
        for unit_id in (*memory.evidence.units_of(name), *titled.by(name)):
            links.setdefault(unit_id, set()).add(name)
    about = {name: titled.by(name) for name in names}
    between = links.keys() - {unit_id for units in about.values() for unit_id in units}
    for name in names:
        for source in about[name]:
            named = (unit_id for key in memory.evidence.entities.get(source, ()) for unit_id in titled.by(key))
            for unit_id in between.intersection(named):
                links[unit_id].add(name)
    found = [
        BridgeDocument(unit_id, tuple(name for name in names if name in links[unit_id]))
        for unit_id in order
        if len(links.get(unit_id, ())) > 1
    ]
    return sorted(found, key=lambda bridge: -len(bridge.names))[:limit]


def rare_bridges(memory: WorkingMemory, order: Sequence[UnitId], limit: int, documents: int) -> list[Bridge]:
    """Return names that the best units share with other documents, and that neither the question nor a title has.

    The strength of a unit is 1 / (2 + its place) among the best, else 0. Names come by the mean strength of the units
    that have them, so that a name of many units comes late; ties in order of the units.

    Args:
        order: the pooled units, the best first.
        documents: units listed with each name.
    """
    graph, titled = memory.evidence, _Titles(memory)
    asked = read_question(memory.query).flat
    strength: dict[str, float] = {}
    for place, unit_id in enumerate(order[:BEST]):
        for key in graph.entities.get(unit_id, ()):
            if (units := len(graph.units[key])) > 1:
                strength[key] = strength.get(key, 0.0) + 1 / (2 + place) / units

    def leads_on(key: str) -> bool:
        holders = {memory.pool.entries[unit_id].doc_id for unit_id in graph.units[key]}
        is_number = key.rstrip("s").replace("/", "").isdecimal()
        return not is_number and len(holders) > 1 and f" {normalised_name(key)} " not in asked and not titled.by(key)

    leading = islice(filter(leads_on, sorted(strength, key=lambda key: -strength[key])), limit)
    return [Bridge(graph.names[key], graph.units[key][:documents], len(graph.units[key])) for key in leading]


@lru_cache(maxsize=256)
def question_names(question: str) -> tuple[str, ...]:
    """Return the names in a question, each once, without numbers and without names inside longer ones."""
    found: dict[str, str] = {}
    for mention in mentions(question, SCANNED_CHARACTERS):
        found.setdefault(entity_key(mention.name), mention.name)
    return tuple(found.values())


class _Titles:
    """The pooled units by what their titles name."""

    def __init__(self, memory: WorkingMemory) -> None:
        self._units = list(memory.value.numbers)
        self._heads = memory.value.names.heads

    def by(self, name: str) -> list[UnitId]:
        return [self._units[number] for number in self._heads.get(head(name), ())]
