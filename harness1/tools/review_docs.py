"""The tool that shows stored documents once more."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation
from harness1.tools.discovery import roomy
from harness1.tools.handles import resolve_all, unknown_handles
from harness1.tools.read_document import Handle, within
from harness1.tools.tool import PLAIN


def review_docs(
    memory: WorkingMemory,
    env: Env,
    doc_ids: Annotated[list[Handle], Meta(description="Handles of documents that were found before.", max_length=256)],
) -> Observation:
    """Show documents that were found before once more, as the memory holds them; costs no search."""
    resolved, unknown = resolve_all(memory, doc_ids)
    if not resolved:
        return Observation("review_docs", error=unknown_handles(unknown) if unknown else Note("no_handles"))
    units = list(dict.fromkeys(resolved.values()))
    notes = [unknown_handles(unknown)] if unknown else []
    if len(units) > env.review.documents:
        notes.append(
            Note("documents_left_out", {"count": len(units) - env.review.documents, "limit": env.review.documents})
        )
    stored = [hit for unit_id in units[: env.review.documents] for hit in memory.hits_of(unit_id)]
    hits = roomy(within(stored, env.observation_limit(env.review.tokens)), PLAIN, (), env)
    if len(hits) < len(stored):
        notes.append(Note("parts_left_out", {"count": len(stored) - len(hits)}))
    return Observation("review_docs", tuple(hits), resolved=dict(resolved), notes=tuple(notes))
