"""The tools that work on documents that were found: read, review, prune, curate, verify, and the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from harness1.config import Env
from harness1.memory.parts import DEFAULT_TAG
from harness1.memory.question import by_relevance
from harness1.memory.working_memory import WorkingMemory
from harness1.records import TAGS, ChunkId, Delta, Hit, Note, Observation, Tag, UnitId, Verdict
from harness1.tools.discovery import fit_window, handle_data, resolve_all, take_within, unknown_handles
from harness1.tools.tool import PLAIN, Judge, Needs, ReadDocument, Steps, Traits

END_SEARCH = "end_search"
MIN_CLAIM_CHARACTERS = 6

Handle = Annotated[str, Meta(description="A handle such as D12; D12.3 reads from the third part on.", max_length=500)]
Claim = Annotated[str, Meta(description="One statement that a document can support or contradict.", max_length=2000)]
Importance = Annotated[
    dict[str, str],
    Meta(description="Tag for each handle, also of curated documents: very_high, high, fair or low.", max_length=256),
    Needs(lambda env: env.has("tags")),
]

MOST_REVIEWED, REVIEW_TOKENS = 5, 4096  # documents of one `review_docs`, and tokens of text that it shows
MOST_JUDGED, JUDGED_CHARACTERS = 5, 6000  # documents of one `verify`, and characters of each that the verifier reads


def _find_units(
    memory: WorkingMemory, handles: list[str], none: str, limit: int | None = None
) -> tuple[dict[str, str], list[UnitId], list[Note]]:
    resolved, unknown = resolve_all(memory, handles)
    units = list(dict.fromkeys(resolved.values()))
    notes = [unknown_handles(unknown)] if unknown else []
    if limit is not None and len(units) > limit:
        notes.append(Note("documents_left_out", {"count": len(units) - limit, "limit": limit}))
    return dict(resolved), units[:limit], notes if resolved or notes else [Note(none)]


@Traits(discovers=True)
def read_document(memory: WorkingMemory, env: Env, doc_id: Handle) -> Steps:
    """Read one document from the corpus in full, as far as the allowance goes."""
    document = memory.pool.document_of(doc_id)
    if document is None:
        return Observation("read_document", error=unknown_handles([doc_id]))
    answer = yield ReadDocument(document)
    first = first_part(doc_id)
    parts = [part for part in answer.hits if part.index >= (first or 0)]
    if choosing := env.read.by == "evidence" and first is None:
        parts = [parts[at] for at in by_relevance([part.text for part in parts], memory.query)]
    hits = _fit(parts, env.read.tokens, env)
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


def first_part(handle: str) -> int | None:
    """Return the index of the part that a handle names: 2 for `D12.3`, None for `D12` or an id."""
    head, _, part = handle.strip().rpartition(".")
    named = head[:1].upper() == "D" and head[1:].isdecimal() and part.isdecimal()
    return max(0, int(part[:6]) - 1) if named else None


def passages_left_out(observation: Observation, env: Env) -> dict[ChunkId, int]:
    """Return, for each hit of a document that was read by evidence, the number of parts left out before it."""
    if env.read.by != "evidence" or observation.tool != read_document.__name__:
        return {}
    following = first_part(next(iter(observation.resolved), "")) or 0
    left_out = {}
    for hit in observation.hits:
        left_out[hit.chunk_id] = max(0, hit.index - following)
        following = hit.index + 1
    return left_out


def _fit(parts: Sequence[Hit], tokens: int, env: Env) -> list[Hit]:
    taken = take_within(parts, (part.tokens for part in parts), env.observation_limit(tokens))
    return fit_window(taken, PLAIN, (), env)


def review_docs(
    memory: WorkingMemory,
    env: Env,
    doc_ids: Annotated[list[Handle], Meta(description="Handles of documents that were found before.", max_length=256)],
) -> Observation:
    """Show documents that were found before once more, as the memory holds them; costs no search."""
    resolved, units, notes = _find_units(memory, doc_ids, "no_handles", MOST_REVIEWED)
    if not resolved:
        return Observation("review_docs", error=notes[0])
    stored = [hit for unit_id in units for hit in memory.hits_of(unit_id)]
    hits = _fit(stored, REVIEW_TOKENS, env)
    if len(hits) < len(stored):
        notes.append(Note("parts_left_out", {"count": len(stored) - len(hits)}))
    return Observation("review_docs", tuple(hits), resolved=resolved, notes=tuple(notes))


@Traits(frees=True)
def prune_chunks(
    memory: WorkingMemory,
    env: Env,
    doc_ids: Annotated[list[Handle], Meta(description="Handles of documents whose text is useless.", max_length=256)],
) -> Observation:
    """Remove the text of documents from the context, to make room. Curated documents stay curated."""
    resolved, units, notes = _find_units(memory, doc_ids, "nothing_to_prune")
    if not resolved:
        return Observation("prune_chunks", error=notes[0])
    return Observation("prune_chunks", resolved=resolved, notes=tuple(notes), delta=Delta(pruned=tuple(units)))


@Traits(curates=True)
def curate(
    memory: WorkingMemory,
    env: Env,
    add_ids: Annotated[list[Handle], Meta(description="Handles to add, best first.", max_length=256)] = [],  # noqa: B006
    remove_ids: Annotated[list[Handle], Meta(description="Handles to remove.", max_length=256)] = [],  # noqa: B006
    importance: Importance = {},  # noqa: B006
) -> Observation:
    """Add documents to the curated set and remove them; removals come first. The set in its final state is your
    result."""
    added, unknown = resolve_all(memory, add_ids)
    removed, missing = resolve_all(memory, remove_ids)
    tagged, untaggable = resolve_all(memory, importance)
    words = {unit_id: importance[reference] for reference, unit_id in tagged.items()}
    tags: dict[UnitId, Tag] = {
        unit_id: next((tag for tag in TAGS if tag == word), DEFAULT_TAG) for unit_id, word in words.items()
    }
    invalid = [importance[reference][:20] for reference in tagged if importance[reference] not in TAGS]
    notes = [Note("invalid_tags", {"tags": invalid[:5]})] if invalid else []
    held = memory.curated.tags
    additions = {unit_id: tags.get(unit_id, held.get(unit_id, DEFAULT_TAG)) for unit_id in added.values()}
    for unit_id, tag in tags.items():
        if unit_id in held:
            additions.setdefault(unit_id, tag)
    absent = [reference for reference, unit_id in removed.items() if unit_id not in held]
    change = memory.curated.edit(additions, list(dict.fromkeys(removed.values())), env.curation)
    strange = list(dict.fromkeys([*unknown, *missing, *untaggable]))
    notes += [unknown_handles(strange)] if strange else []
    notes += [Note("not_curated", handle_data(absent))] if absent else []
    if not additions and not removed:
        return Observation("curate", error=notes[0] if notes else Note("nothing_to_curate"))
    return Observation("curate", resolved={**tagged, **removed, **added}, notes=tuple(notes), delta=change)


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
    resolved, asked, notes = _find_units(memory, doc_ids, "no_handles", MOST_JUDGED)
    if not resolved:
        return Observation("verify", error=notes[0])
    cached = {unit_id for unit_id in asked if _recall(memory, words, unit_id)}
    open_units = [unit_id for unit_id in asked if unit_id not in cached]
    if open_units:
        texts = tuple((unit_id, memory.text_of(unit_id)[:JUDGED_CHARACTERS]) for unit_id in open_units)
        answer = yield Judge(words, texts)
        for verdict in answer.verdicts:
            if verdict.unit_id in open_units:
                memory.verification.put(verdict, len(memory.pool.entries[verdict.unit_id].chunk_ids))
    verdicts = tuple(
        msgspec.structs.replace(found, cached=unit_id in cached)
        for unit_id in asked
        if (found := _recall(memory, words, unit_id))
    )
    return Observation("verify", verdicts=verdicts, resolved=resolved, notes=tuple(notes))


def _recall(memory: WorkingMemory, claim: str, unit_id: UnitId) -> Verdict | None:
    return memory.verification.get(claim, unit_id, len(memory.pool.entries[unit_id].chunk_ids))


def end_search(
    memory: WorkingMemory,
    env: Env,
    reasoning: Annotated[str, Meta(description="Why the curated set is complete, or cannot be completed.")] = "",
) -> Observation:
    """Finish the search. The curated set is delivered as it stands."""
    return Observation(END_SEARCH)
