"""verify: does a document support a claim?"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation, UnitId, Verdict
from harness1.tools.handles import resolve_all, unknown_handles
from harness1.tools.read_document import Handle
from harness1.tools.requests import Judge
from harness1.tools.tool import Steps

MIN_CLAIM_CHARACTERS = 6
Claim = Annotated[str, Meta(description="One statement that a document can support or contradict.", max_length=2000)]


def verify(
    memory: WorkingMemory,
    env: Env,
    doc_ids: Annotated[list[Handle], Meta(description="Handles of the documents to check.", max_length=256)],
    claim: Claim,
) -> Steps:
    """Check a claim against documents that were found before. Verdicts are yes, no or unclear, with the sentence they
    rest on; they are remembered."""
    words = " ".join(claim.split())
    if len(words) < MIN_CLAIM_CHARACTERS:
        return Observation("verify", error=Note("claim_too_short", {"characters": MIN_CLAIM_CHARACTERS}))
    resolved, unknown = resolve_all(memory, doc_ids)
    if not resolved:
        return Observation("verify", error=unknown_handles(unknown) if unknown else Note("no_handles"))
    units = list(dict.fromkeys(resolved.values()))
    limit = env.verification.documents
    notes = [unknown_handles(unknown)] if unknown else []
    if len(units) > limit:
        notes.append(Note("documents_left_out", {"count": len(units) - limit, "limit": limit}))
    asked = units[:limit]
    cached = {unit_id for unit_id in asked if _known(memory, words, unit_id)}
    open_units = [unit_id for unit_id in asked if unit_id not in cached]
    if open_units:
        texts = tuple((unit_id, _text(memory, env, unit_id)) for unit_id in open_units)
        answer = yield Judge(words, texts)
        for verdict in answer.verdicts:
            if verdict.unit_id in open_units:
                memory.verification.put(verdict, len(memory.pool.entries[verdict.unit_id].chunk_ids))
    verdicts = tuple(
        msgspec.structs.replace(found, cached=unit_id in cached)
        for unit_id in asked
        if (found := _known(memory, words, unit_id))
    )
    return Observation("verify", verdicts=verdicts, resolved=dict(resolved), notes=tuple(notes))


def _text(memory: WorkingMemory, env: Env, unit_id: UnitId) -> str:
    """Return the text that is judged, under its title if the configuration asks for it."""
    title = " ".join(memory.hits_of(unit_id)[0].title.split()) if env.verification.titles else ""
    text = memory.text_of(unit_id)
    return (f"{title}\n{text}" if title else text)[: env.verification.characters]


def _known(memory: WorkingMemory, claim: str, unit_id: UnitId) -> Verdict | None:
    """Return the remembered verdict, unless the unit has gained text since."""
    return memory.verification.get(claim, unit_id, len(memory.pool.entries[unit_id].chunk_ids))
