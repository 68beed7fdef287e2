"""A tool that says how long documents are."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation
from harness1.tools.documents import resolve_all, unknown_handles


def count_words(
    memory: WorkingMemory,
    env: Env,
    doc_ids: Annotated[list[str], Meta(description="Handles of documents that were found before.", max_length=30)],
) -> Observation:
    """Count the words of documents, as far as they were shown; costs no search."""
    resolved, unknown = resolve_all(memory, doc_ids)
    if not resolved:
        return Observation("count_words", error=unknown_handles(unknown) if unknown else Note("no_handles"))
    counts = [f"{handle} {len(memory.text_of(unit_id).split())}" for handle, unit_id in resolved.items()]
    notes = [Note("said", {"text": f"Words: {', '.join(counts)}."}), *([unknown_handles(unknown)] if unknown else [])]
    return Observation("count_words", resolved=dict(resolved), notes=tuple(notes))
