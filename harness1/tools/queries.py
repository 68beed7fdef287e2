"""Puts queries as a policy writes them into the words that the corpus is searched for."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Record
from harness1.tools.handles import named


class Queries(Record):
    """Distinct queries in words, empty if there is a `refusal`. `resolved` maps the entity handles that were used to
    names."""

    queries: tuple[str, ...]
    resolved: dict[str, str] = {}
    notes: tuple[Note, ...] = ()
    refusal: Note | None = None


def spelled(memory: WorkingMemory, env: Env, queries: Sequence[str]) -> Queries:
    """Put queries on one line each, with names in place of entity handles.

    A word such as E7 that is no handle of this episode is searched for as it stands, and told; a query of nothing else
    is left out.
    """
    lines = [line for line in (" ".join(query.split()) for query in queries) if line]
    if not env.evidence.handles:
        return Queries(tuple(dict.fromkeys(lines)), refusal=None if lines else Note("empty_query"))
    in_words = [memory.entities.spelled(line) for line in lines]
    unknown = list(dict.fromkeys(handle for query in in_words for handle in query.unknown))
    notes = (Note("unknown_entities", named(unknown)),) if unknown else ()
    words = tuple(dict.fromkeys(query.text for query in in_words if not query.empty))
    resolved = {handle: name for query in in_words for handle, name in query.resolved.items()}
    refusal = None if words else next(iter(notes), Note("empty_query"))
    return Queries(words, resolved, notes, refusal)
