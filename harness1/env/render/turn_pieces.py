"""The pieces of one finished turn: the policy's output, the head of the observation, and one piece for each hit.

They are made once, when the turn ends, and never change afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from harness1.config import Env
from harness1.env.render.pieces import Piece, action_piece, action_text, piece, shown_call
from harness1.env.render.prose import sentence
from harness1.env.render.view import ActionView, ChangesView, DocumentView, HitView, JudgementView, TurnView
from harness1.memory.working_memory import WorkingMemory
from harness1.plain import counted
from harness1.records import Delta, Hit, Observation, Ranking, Tag, Turn, UnitId, Verdict
from harness1.tools.discovery import shown_text, shown_title
from harness1.tools.documents import passages_left_out
from harness1.tools.tool import Traits

QUERIES_CHARACTERS = 1000
QUERY_CHARACTERS = 200
"""If the queries together exceed the first length, each is cut to the second, so that a small window holds them."""
PASSAGE_CHARACTERS = 300
"""Characters shown of the passage that a verdict rests on."""


class TurnPieces(msgspec.Struct, frozen=True):
    """The pieces of a turn. `action` and `head` stay together; `hits` may be dropped unless the turn is the last."""

    turn: int
    action: Piece
    head: Piece
    hits: tuple[Piece, ...]

    def pieces(self) -> tuple[Piece, ...]:
        """Return the whole turn in the order shown."""
        return (self.action, self.head, *self.hits)


def turn_pieces(memory: WorkingMemory, env: Env, turn: Turn, traits: Traits) -> TurnPieces:
    """Split a finished turn into pieces; the memory is the one after the turn, the traits are those of its tool."""
    assert turn.observation is not None
    called = ActionView(turn.index, shown_call(turn.action)) if turn.action else None
    call = turn.calls[-1] if turn.calls and turn.calls[-1].output_ids else None
    action = action_piece(turn.index, action_text(turn.reasoning, turn.action), called, call)
    hits = _hits(memory, env, turn.index, turn.observation, traits)
    return TurnPieces(turn.index, action, _head(memory, env, turn.index, turn.observation), hits)


def _head(memory: WorkingMemory, env: Env, turn: int, observation: Observation) -> Piece:
    shown = TurnView(
        turn=turn,
        tool=observation.tool,
        queries=shown_queries(observation.rankings),
        notes=observation.notes,
        error=observation.error,
        verdicts=tuple(_judgement(memory, verdict) for verdict in observation.verdicts),
        changes=_changes(memory, env, observation.delta),
    )
    # A single query is shown too, because an epoch opens with the observation, without the action before it.
    single = f": {shown.queries[0]}" if len(shown.queries) == 1 else ""
    lines = [f"Turn {turn}: {shown.tool}{single}"]
    if shown.error is not None:
        lines.append(sentence(shown.error))
    lines += [sentence(note) for note in shown.notes]
    if len(shown.queries) > 1:
        lines += [f"q{number}: {query}" for number, query in enumerate(shown.queries, start=1)]
    lines += [_judgement_line(verdict) for verdict in shown.verdicts]
    lines += _change_lines(env, shown.changes)
    return piece(f"turn/{turn}", "tool", "\n".join(lines), shown)


def shown_queries(rankings: Sequence[Ranking]) -> tuple[str, ...]:
    """Return the queries of an observation as its head shows them, each on one line."""
    queries = [" ".join(ranking.query.split()) for ranking in rankings]
    if sum(map(len, queries)) > QUERIES_CHARACTERS:
        queries = [query[:QUERY_CHARACTERS].rstrip() for query in queries]
    return tuple(queries)


def _judgement(memory: WorkingMemory, verdict: Verdict) -> JudgementView:
    passage = " ".join(verdict.sentence.split())[:PASSAGE_CHARACTERS].rstrip()
    return JudgementView(handle_of(memory, verdict.unit_id), verdict.label, passage, verdict.cached)


def _judgement_line(shown: JudgementView) -> str:
    known = " (known)" if shown.known else ""
    reason = f": {shown.passage}" if shown.passage else ""
    return f"{shown.handle} {shown.label}{known}{reason}"


def _changes(memory: WorkingMemory, env: Env, delta: Delta) -> ChangesView:
    def tagged(tags: dict[UnitId, Tag]) -> dict[str, Tag | None]:
        return {handle_of(memory, unit_id): tag if env.curation.tags else None for unit_id, tag in tags.items()}

    def named(units: Iterable[UnitId]) -> tuple[str, ...]:
        return tuple(handle_of(memory, unit_id) for unit_id in units)

    return ChangesView(
        added=tagged(delta.added),
        retagged=tagged(delta.retagged),
        removed=named(delta.removed),
        evicted=named(delta.evicted),
        refused=named(delta.refused),
        copied=tuple(sorted(set(named(delta.aliases.values())))),
        pruned=named(delta.pruned),
    )


def _change_lines(env: Env, shown: ChangesView) -> list[str]:
    groups = (
        ("Added", _tagged(shown.added)),
        ("Re-tagged", _tagged(shown.retagged)),
        ("Removed", shown.removed),
        ("Evicted for more important ones" if env.curation.eviction == "rank" else "Evicted", shown.evicted),
        ("Refused, the set is full", shown.refused),
        ("Hidden copies of", shown.copied),
        ("Pruned", shown.pruned),
    )
    return [f"{label}: {', '.join(names)}." for label, names in groups if names]


def _tagged(tags: dict[str, Tag | None]) -> list[str]:
    return [f"{handle} {tag}" if tag else handle for handle, tag in tags.items()]


def _hits(memory: WorkingMemory, env: Env, turn: int, observation: Observation, traits: Traits) -> tuple[Piece, ...]:
    places: dict[str, list[tuple[int, int]]] = {}
    queries = len(observation.rankings)
    for query, ranking in enumerate(observation.rankings):
        for rank, chunk_id in enumerate(ranking.chunk_ids):
            places.setdefault(chunk_id, []).append((query, rank))
    copies = list(observation.delta.aliases.values())
    left_out = passages_left_out(observation, env)
    pieces: list[Piece] = []
    names = env.evidence.handles
    for hit, words in shown_words(memory, env, observation, traits):
        unit_id = memory.pool.unit_of(hit)
        title, _, text = words.partition("\n")
        marked, entities = memory.entities.marked(words, env.evidence.characters) if names else (words, {})
        shown = HitView(
            turn=turn,
            document=DocumentView(handle_of(memory, unit_id), unit_id, title, text),
            found_by=((0, len(pieces)),) if queries == 1 else tuple(places.get(hit.chunk_id, ())),
            copies=copies.count(unit_id),
            passed_over=left_out.get(hit.chunk_id, 0),
            entities=entities,
        )
        pieces.append(piece(f"hit/{turn}", "tool", _hit_text(memory, hit, marked, shown, queries), shown))
    return tuple(pieces)


def shown_words(memory: WorkingMemory, env: Env, observation: Observation, traits: Traits) -> Iterator[tuple[Hit, str]]:
    """Yield the shown hits of an observation, each with its title, a line end and its shown text."""
    for hit in observation.hits:
        unit_id = memory.pool.unit_of(hit)
        if unit_id in memory.pool.entries and unit_id not in observation.delta.aliases:
            yield hit, f"{shown_title(hit.title, env)}\n{shown_text(hit, traits, observation.rankings, env)}"


def _hit_text(memory: WorkingMemory, hit: Hit, words: str, shown: HitView, queries: int) -> str:
    label = shown.document.handle
    entry = memory.pool.entries[shown.document.unit_id]
    if hit.index or len(entry.chunk_ids) > 1:
        label = memory.pool.chunk_handle(hit)
    marks = [f"q{query + 1}#{rank + 1}" for query, rank in shown.found_by] if queries > 1 else []
    if shown.copies:
        marks.append(f"also: {shown.copies} copies" if shown.copies > 1 else "also: 1 copy")
    title, _, text = words.partition("\n")
    header = " ".join(part for part in (f"[{label}]", title, *marks) if part)
    return f"{_gap(memory, hit, shown.passed_over)}{header}\n{text}"


def _gap(memory: WorkingMemory, hit: Hit, passages: int) -> str:
    """Return the line for the passages left out before a hit, with the handle that reads them."""
    if not passages:
        return ""
    words = counted(passages, "passage")
    return f"[{words} left out: read D{memory.pool.numbers[hit.doc_id]}.{hit.index + 1 - passages}]\n"


def handle_of(memory: WorkingMemory, unit_id: UnitId) -> str:
    """Return the handle of a pooled unit."""
    return memory.pool.entries[unit_id].handle
