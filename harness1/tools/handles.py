"""Resolves the handles of documents and entities that a policy writes, with a note for those that name nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Record, UnitId

SHOWN_CHARACTERS = 40
SHOWN_HANDLES = 5
QUERY_CHARACTERS = 2000
"""Longest query, also with names in place of entity handles, of which each may be 50 times as long."""


class Queries(Record):
    """Distinct queries in words, empty if there is a `refusal`. `resolved` maps the entity handles that were used to
    names."""

    queries: tuple[str, ...]
    resolved: dict[str, str] = {}
    notes: tuple[Note, ...] = ()
    refusal: Note | None = None


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


def spelled(memory: WorkingMemory, env: Env, queries: Sequence[str]) -> Queries:
    """Put queries on one line each, with names in place of entity handles.

    A word such as E7 that no entity of this episode has stays in the query, and is reported; a query with nothing else
    in it is left out.
    """
    lines = [line for line in (" ".join(query.split()) for query in queries) if line]
    if not env.has_handles:
        return Queries(tuple(dict.fromkeys(lines)), refusal=None if lines else Note("empty_query"))
    question = memory.query if env.leads_have_handles else ""
    in_words = [memory.entities.spelled(line, " ".join(question.split())) for line in lines]
    unknown = list(dict.fromkeys(handle for query in in_words for handle in query.unknown))
    notes = (Note("unknown_entities", named(unknown)),) if unknown else ()
    words = tuple(dict.fromkeys(query.text[:QUERY_CHARACTERS].rstrip() for query in in_words if not query.empty))
    resolved = {handle: name for query in in_words for handle, name in query.resolved.items()}
    refusal = None if words else next(iter(notes), Note("empty_query"))
    return Queries(words, resolved, notes, refusal)
