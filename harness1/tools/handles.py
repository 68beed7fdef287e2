"""Resolves the handles that a policy writes, with a note for those that name nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, UnitId

SHOWN_CHARACTERS = 40
SHOWN_HANDLES = 5


def resolve_all(memory: WorkingMemory, references: Iterable[str]) -> tuple[dict[str, UnitId], list[str]]:
    """Return the units that references name, in order, and the references that name nothing."""
    resolved: dict[str, UnitId] = {}
    unknown: list[str] = []
    for reference in dict.fromkeys(references):
        unit_id = memory.pool.resolve(reference)
        if unit_id is None:
            unknown.append(reference)
        else:
            resolved[reference] = unit_id
    return resolved, unknown


def unknown_handles(references: list[str]) -> Note:
    """Return the note on documents that no search has returned."""
    return Note("unknown_handles", named(references))


def named(references: list[str]) -> dict[str, Any]:
    """Return a note's data on handles as the policy wrote them: the first ones, cut, and their number."""
    shown = [reference[:SHOWN_CHARACTERS] for reference in references[:SHOWN_HANDLES]]
    return {"handles": shown, "count": len(references)}
