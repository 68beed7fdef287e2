"""The pieces of one finished turn: the policy's output, and the observation head first, then one piece for each hit.

They are made once, when the turn ends, and never change afterwards.
"""

from __future__ import annotations

import msgspec

from harness1.config import Env
from harness1.env.memory import WorkingMemory
from harness1.env.pieces import Piece, action_text, piece
from harness1.env.prose import sentence
from harness1.env.view import DocumentView, HitView, TurnView
from harness1.records import Hit, Observation, Tag, Turn, UnitId, Verdict
from harness1.tools.discovery import shown_text

COMPRESSED = ("search_corpus", "fan_out_search", "grep_corpus")


class TurnPieces(msgspec.Struct, frozen=True):
    """`action` and `head` always stand together; `hits` may be dropped from a turn that is not the last."""

    turn: int
    action: Piece
    head: Piece
    hits: tuple[Piece, ...]


def turn_pieces(memory: WorkingMemory, env: Env, turn: Turn) -> TurnPieces:
    """Put a finished turn into pieces; the memory is the one after the turn."""
    assert turn.observation is not None
    action = piece(f"action/{turn.index}", "assistant", action_text(turn.reasoning, turn.action), None, turn.index)
    hits = _hits(memory, env, turn.index, turn.observation)
    return TurnPieces(turn.index, action, _head(memory, env, turn, turn.observation), hits)


def _head(memory: WorkingMemory, env: Env, turn: Turn, observation: Observation) -> Piece:
    shown = TurnView(
        turn=turn.index,
        action=turn.action,
        queries=tuple(ranking.query for ranking in observation.rankings),
        returned=len(observation.hits),
        notes=observation.notes,
        error=observation.error,
        verdicts=observation.verdicts,
        delta=observation.delta,
    )
    lines = [f"Turn {turn.index}: {observation.tool}"]
    if observation.error is not None:
        lines.append(sentence(observation.error))
    lines += [sentence(note) for note in observation.notes]
    if len(observation.rankings) > 1:
        lines += [f"q{number}: {ranking.query}" for number, ranking in enumerate(observation.rankings, start=1)]
    lines += [_verdict(memory, verdict) for verdict in observation.verdicts]
    lines += _changes(memory, env, observation)
    return piece(f"turn/{turn.index}", "tool", "\n".join(lines), shown)


def _verdict(memory: WorkingMemory, verdict: Verdict) -> str:
    known = " (known)" if verdict.cached else ""
    reason = f": {verdict.sentence}" if verdict.sentence else ""
    return f"{handle_of(memory, verdict.unit_id)} {verdict.label}{known}{reason}"


def _changes(memory: WorkingMemory, env: Env, observation: Observation) -> list[str]:
    """What the action did to the curated set and which duplicates it hid, by handle."""
    delta = observation.delta
    groups = (
        ("Added", _tagged(memory, env, delta.added)),
        ("Re-tagged", _tagged(memory, env, delta.retagged)),
        ("Removed", [handle_of(memory, unit_id) for unit_id in delta.removed]),
        (
            "Evicted for more important ones" if env.curation.eviction == "rank" else "Evicted",
            [handle_of(memory, unit_id) for unit_id in delta.evicted],
        ),
        ("Refused, the set is full", [handle_of(memory, unit_id) for unit_id in delta.refused]),
        ("Hidden copies of", sorted({handle_of(memory, unit_id) for unit_id in delta.aliases.values()})),
    )
    return [f"{label}: {', '.join(names)}." for label, names in groups if names]


def _tagged(memory: WorkingMemory, env: Env, tags: dict[UnitId, Tag]) -> list[str]:
    handles = [handle_of(memory, unit_id) for unit_id in tags]
    return (
        [f"{handle} {tag}" for handle, tag in zip(handles, tags.values(), strict=True)]
        if env.curation.tags
        else handles
    )


def _hits(memory: WorkingMemory, env: Env, turn: int, observation: Observation) -> tuple[Piece, ...]:
    places: dict[str, list[tuple[int, int]]] = {}
    for query, ranking in enumerate(observation.rankings):
        for rank, chunk_id in enumerate(ranking.chunk_ids):
            places.setdefault(chunk_id, []).append((query, rank))
    new = set(observation.delta.new)
    copies = list(observation.delta.aliases.values())
    pieces = []
    for hit in observation.hits:
        unit_id = memory.pool.unit_of(hit)
        if unit_id not in memory.pool.entries or unit_id in observation.delta.aliases:
            continue
        text = (
            shown_text(hit, observation.tool, observation.rankings, env)
            if observation.tool in COMPRESSED
            else hit.text.strip()
        )
        shown = HitView(
            turn=turn,
            document=DocumentView(handle_of(memory, unit_id), unit_id, hit.title, text),
            found_by=tuple(places.get(hit.chunk_id, ())),
            new=unit_id in new,
            copies=copies.count(unit_id),
        )
        pieces.append(piece(f"hit/{turn}", "tool", _hit_text(memory, hit, shown, len(observation.rankings)), shown))
    return tuple(pieces)


def _hit_text(memory: WorkingMemory, hit: Hit, shown: HitView, queries: int) -> str:
    label = shown.document.handle
    entry = memory.pool.entries[shown.document.unit_id]
    if hit.index or len(entry.chunk_ids) > 1:
        label = memory.pool.chunk_handle(hit)
    marks = [f"q{query + 1}#{rank + 1}" for query, rank in shown.found_by] if queries > 1 else []
    if shown.copies:
        marks.append(f"also: {shown.copies} copies" if shown.copies > 1 else "also: 1 copy")
    header = " ".join(part for part in (f"[{label}]", " ".join(hit.title.split()), *marks) if part)
    return f"{header}\n{shown.document.text}"


def handle_of(memory: WorkingMemory, unit_id: UnitId) -> str:
    """The handle of a pooled unit."""
    return memory.pool.entries[unit_id].handle
