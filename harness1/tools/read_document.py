"""The tool that reads one document in full."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Delta, Hit, Note, Observation
from harness1.tools.discovery import roomy
from harness1.tools.handles import unknown_handles
from harness1.tools.requests import ReadDocument
from harness1.tools.tool import PLAIN, Steps, Traits

Handle = Annotated[str, Meta(description="A handle such as D12; D12.3 reads from the third part on.", max_length=500)]


@Traits(discovers=True)
def read_document(memory: WorkingMemory, env: Env, doc_id: Handle) -> Steps:
    """Read one document from the corpus in full, as far as the allowance goes."""
    document = memory.pool.document_of(doc_id)
    if document is None:
        return Observation("read_document", error=unknown_handles([doc_id]))
    answer = yield ReadDocument(document)
    parts = [part for part in answer.hits if part.index >= first_part(doc_id)]
    hits = roomy(within(parts, env.observation_limit(env.read.tokens)), PLAIN, (), env)
    if not hits:
        return Observation("read_document", resolved={doc_id: document}, error=Note("no_such_part"))
    new, aliases = memory.absorb(hits, env)
    notes = []
    left = len(parts) - len(hits) + answer.unshown
    if left:
        number = memory.pool.numbers[document]
        notes.append(Note("continues", {"handle": f"D{number}.{hits[-1].index + 2}", "parts": left}))
    delta = Delta(new=tuple(new), aliases=aliases)
    return Observation("read_document", tuple(hits), resolved={doc_id: document}, notes=tuple(notes), delta=delta)


def first_part(handle: str) -> int:
    """Return the index of the part that a handle names: 2 for `D12.3`, 0 for `D12` or an id."""
    head, _, part = handle.strip().rpartition(".")
    is_handle = head[:1].upper() == "D" and head[1:].isdecimal() and part.isdecimal()
    return max(0, int(part[:6]) - 1) if is_handle else 0


def within(parts: list[Hit], tokens: int) -> list[Hit]:
    """Return as many whole parts from the first on as the allowance holds, at least one."""
    kept: list[Hit] = []
    for part in parts:
        if kept and part.tokens > tokens:
            break
        kept.append(part)
        tokens -= part.tokens
    return kept
