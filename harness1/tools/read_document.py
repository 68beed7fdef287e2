"""The tool that reads one document in full."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.passages import by_relevance
from harness1.memory.working_memory import WorkingMemory
from harness1.records import ChunkId, Delta, Hit, Note, Observation
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
    if choosing := env.read.by == "evidence" and not names_part(doc_id):
        parts = [parts[at] for at in by_relevance([part.text for part in parts], memory.query)]
    hits = roomy(within(parts, env.observation_limit(env.read.tokens)), PLAIN, (), env)
    after = parts[len(hits) :]
    if choosing and hits:
        hits.sort(key=lambda part: part.index)
        after = [part for part in after if part.index > hits[-1].index]
    if not hits:
        return Observation("read_document", resolved={doc_id: document}, error=Note("no_such_part"))
    new, aliases = memory.absorb(hits, env)
    notes = []
    left = len(after) + answer.unshown
    if left:
        number = memory.pool.numbers[document]
        notes.append(Note("continues", {"handle": f"D{number}.{hits[-1].index + 2}", "parts": left}))
    delta = Delta(new=tuple(new), aliases=aliases)
    return Observation("read_document", tuple(hits), resolved={doc_id: document}, notes=tuple(notes), delta=delta)


def names_part(handle: str) -> bool:
    """Return whether a handle names a part of a document, as `D12.3` does."""
    head, _, part = handle.strip().rpartition(".")
    return head[:1].upper() == "D" and head[1:].isdecimal() and part.isdecimal()


def first_part(handle: str) -> int:
    """Return the index of the part that a handle names: 2 for `D12.3`, 0 for `D12` or an id."""
    return max(0, int(handle.strip().rpartition(".")[2][:6]) - 1) if names_part(handle) else 0


def passages_left_out(observation: Observation, env: Env) -> dict[ChunkId, int]:
    """Return, for each hit of a document that was read by evidence, the number of parts left out before it."""
    if env.read.by != "evidence" or observation.tool != read_document.__name__:
        return {}
    following = first_part(next(iter(observation.resolved), ""))
    left_out = {}
    for hit in observation.hits:
        left_out[hit.chunk_id] = max(0, hit.index - following)
        following = hit.index + 1
    return left_out


def within(parts: list[Hit], tokens: int) -> list[Hit]:
    """Return as many whole parts from the first on as the allowance holds, at least one."""
    kept: list[Hit] = []
    for part in parts:
        if kept and part.tokens > tokens:
            break
        kept.append(part)
        tokens -= part.tokens
    return kept
