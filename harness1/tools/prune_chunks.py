"""The tool that removes the text of documents from the context."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Delta, Note, Observation
from harness1.tools.handles import resolve_all, unknown_handles
from harness1.tools.read_document import Handle
from harness1.tools.tool import Traits


@Traits(frees=True)
def prune_chunks(
    memory: WorkingMemory,
    env: Env,
    doc_ids: Annotated[list[Handle], Meta(description="Handles of documents whose text is useless.", max_length=256)],
) -> Observation:
    """Remove the text of documents from the context, to make room. Curated documents stay curated."""
    resolved, unknown = resolve_all(memory, doc_ids)
    if not resolved:
        return Observation("prune_chunks", error=unknown_handles(unknown) if unknown else Note("nothing_to_prune"))
    notes = (unknown_handles(unknown),) if unknown else ()
    delta = Delta(pruned=tuple(dict.fromkeys(resolved.values())))
    return Observation("prune_chunks", resolved=dict(resolved), notes=notes, delta=delta)
