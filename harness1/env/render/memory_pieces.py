"""The pieces that show the working memory as it is now, each with its drop class."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import islice

from harness1.config import Env
from harness1.env.render.budget import Block, Drop
from harness1.env.render.pieces import Piece, piece
from harness1.env.render.turn_pieces import handle_of
from harness1.env.render.view import (
    BridgesView,
    BridgeView,
    CuratedSetView,
    CuratedView,
    DocumentView,
    HistoryView,
    LeadsView,
    LeadView,
    OlderView,
    PoolSizeView,
    RankedView,
    VerdictsView,
    VerdictView,
)
from harness1.memory.evidence_value import Assessment, Value
from harness1.memory.history import HistoryLine
from harness1.memory.leads import Lead
from harness1.memory.pool import Entry
from harness1.memory.working_memory import WorkingMemory
from harness1.records import ChunkId, UnitId
from harness1.tools.discovery import shown_title

CLAIM_CHARACTERS = 120
RANKED = 30
"""Documents that the line of the evidence order names: as many as can be delivered."""
LEAD_SOURCES = 3
"""Documents that are shown to name a lead."""


class MemoryPieces:
    """Renders the memory, and reuses the lines of documents that did not change."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self._lines: dict[tuple[str, str, ChunkId], Block] = {}
        self._turns: dict[HistoryLine, Block] = {}

    def of(self, memory: WorkingMemory, visible: Set[UnitId]) -> list[Block]:
        """Return all sections in order. Documents in `visible` appear in a shown turn and get no pool line."""
        found = memory.assess() if self.env.evidence.ranks else Assessment()
        placed = [Block((curated_piece(memory, self.env),))]
        if found.units:
            placed.append(Block((_ranked(memory, found.best(RANKED)),), Drop.OLD_TURNS))
        if self.env.leads_on and found.leads:
            placed.append(Block((_leads(memory, found.leads[: self.env.leads.lines], self.env),), Drop.EVIDENCE))
        placed += self._curated_lines(memory, visible)
        placed += self._pool(memory, visible)
        if self.env.evidence.on:
            placed += _evidence(memory, self.env)
        if self.env.verification.on:
            placed += _verdicts(memory, self.env)
        if self.env.history.on:
            placed += self._history(memory)
        return placed

    def _curated_lines(self, memory: WorkingMemory, visible: Set[UnitId]) -> list[Block]:
        hidden = [entry for entry in memory.curated.ranked() if entry.unit_id not in visible]
        return [self._line(Drop.CURATED_LINES, memory, entry.unit_id, entry.tag) for entry in hidden]

    def _pool(self, memory: WorkingMemory, visible: Set[UnitId]) -> list[Block]:
        hidden = len(memory.pool.aliases)
        entries, tags = memory.pool.entries, memory.curated.tags
        size = PoolSizeView(len(entries), len(entries) - len(tags), hidden)
        copies = f", {hidden} near duplicates hidden" if self.env.dedup.on else ""
        text = f"Pool: {size.total} documents, {size.uncurated} not curated{copies}."
        placed = [Block((piece("pool", "user", text, size),))]
        rest = (unit_id for unit_id in reversed(entries) if unit_id not in visible and unit_id not in tags)
        shown = list(islice(rest, self.env.pool.lines))
        older = list(islice(rest, self.env.pool.older))
        placed += [self._line(Drop.POOL, memory, unit_id, "") for unit_id in shown]
        left = size.uncurated - sum(unit_id in entries and unit_id not in tags for unit_id in visible) - len(shown)
        if left:
            placed.append(Block((_older(memory, older, left - len(older)),), Drop.OLDER))
        return placed

    def _history(self, memory: WorkingMemory) -> list[Block]:
        lines = memory.history[-self.env.history.lines :]
        if not lines:
            return []
        earlier = len(memory.history) - len(lines)
        head = f"History, {earlier} earlier turns left out:" if earlier else "History:"
        placed = [Block((piece("history", "user", head, HistoryView((), earlier)),), Drop.HISTORY, memory.turn)]
        for line in lines:
            if line not in self._turns:
                self._turns[line] = _history_line(line)
            placed.append(self._turns[line])
        return placed

    def _line(self, drop: Drop, memory: WorkingMemory, unit_id: UnitId, tag: str) -> Block:
        # In another episode or branch a unit has another handle or another first chunk.
        entry = memory.pool.entries[unit_id]
        key = (tag, entry.handle, entry.chunk_ids[0])
        if key not in self._lines:
            self._lines[key] = Block((_document_line(entry, memory, tag, self.env),), drop)
        return self._lines[key]


def curated_piece(memory: WorkingMemory, env: Env) -> Piece:
    """Return the whole curated set by handle: the smallest form of the memory, which is never dropped."""
    entries = tuple(
        CuratedView(handle_of(memory, entry.unit_id), entry.unit_id, entry.tag if env.curation.tags else None)
        for entry in memory.curated.ranked()
    )
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(entry.tag or "all", []).append(entry.handle)
    listed = "; ".join(f"{tag}: {', '.join(handles)}" for tag, handles in groups.items())
    text = f"Curated {len(entries)}/{env.curation.cap}. {listed or 'Nothing yet.'}"
    return piece("curated", "user", text, CuratedSetView(entries, env.curation.cap))


def _document_line(entry: Entry, memory: WorkingMemory, tag: str, env: Env) -> Piece:
    text = memory.store[entry.chunk_ids[0]].text[: 4 * env.pool.snippet]
    snippet = " ".join(text.split())[: env.pool.snippet].rstrip()
    shown = DocumentView(entry.handle, entry.unit_id, shown_title(entry.title, env), snippet)
    section = "curated" if tag else "pool"
    mark = f" ({tag})" if tag and env.curation.tags else ""
    line = f"{entry.handle}{mark} {shown.title}: {snippet}"
    return piece(f"{section}/{entry.handle}", "user", line, shown)


def _ranked(memory: WorkingMemory, values: Sequence[Value]) -> Piece:
    handles = tuple(handle_of(memory, value.unit_id) for value in values)
    words = [
        f"{handle} ({'; '.join(value.reasons)})" if value.reasons else handle
        for handle, value in zip(handles, values, strict=True)
    ]
    return piece("ranked", "user", f"By evidence: {', '.join(words)}.", RankedView(handles))


def _leads(memory: WorkingMemory, leads: Sequence[Lead], env: Env) -> Piece:
    shown, words = [], []
    for lead in leads:
        name = " ".join(lead.name.split())
        handles = tuple(handle_of(memory, unit_id) for unit_id in lead.sources[:LEAD_SOURCES])
        shown.append(LeadView(name, handles))
        source = f"named by {', '.join(handles)}" if handles else "named in the question"
        source = "part of the question" if lead.is_part else f"{source}; not found yet"
        words.append(f"{memory.entities.marked(name, env.evidence.characters)[0]} ({source})")
    return piece("leads", "user", f"Search next: {'; '.join(words)}.", LeadsView(tuple(shown)))


def _older(memory: WorkingMemory, units: list[UnitId], more: int) -> Piece:
    handles = tuple(handle_of(memory, unit_id) for unit_id in units)
    text = f"Older: {', '.join(handles)}" + (f" (+{more} more)" if more else "")
    return piece("older", "user", text, OlderView(handles, more))


def _evidence(memory: WorkingMemory, env: Env) -> list[Block]:
    found = memory.evidence.bridges(env.evidence.entities, env.evidence.documents)
    if not found and not memory.evidence.singletons:
        return []
    bridges = []
    for bridge in found:
        handles = tuple(handle_of(memory, unit_id) for unit_id in bridge.unit_ids)
        bridges.append(BridgeView(bridge.entity, handles, bridge.total))
    words = [
        f"{bridge.entity} ({', '.join(bridge.handles)}"
        + (f" +{bridge.total - len(bridge.handles)} more)" if bridge.total > len(bridge.handles) else ")")
        for bridge in bridges
    ]
    text = "Shared entities: " + ("; ".join(words) or "none") + f". In one document only: {memory.evidence.singletons}."
    shown = BridgesView(tuple(bridges), memory.evidence.singletons)
    return [Block((piece("evidence", "user", text, shown),), Drop.EVIDENCE)]


def _verdicts(memory: WorkingMemory, env: Env) -> list[Block]:
    recent = memory.verification.recent(env.verification.lines)
    if not recent:
        return []
    shown = tuple(
        VerdictView(handle_of(memory, seen.unit_id), seen.claim[:CLAIM_CHARACTERS].rstrip(), seen.label)
        for seen in recent
    )
    lines = [f"{verdict.handle} {verdict.label}: {verdict.claim}" for verdict in shown]
    return [Block((piece("verdicts", "user", "Verified:\n" + "\n".join(lines), VerdictsView(shown)),), Drop.EVIDENCE)]


def _history_line(line: HistoryLine) -> Block:
    text = f"T{line.turn} {line.tool} ({line.subject}): returned {line.returned}, new {line.new}"
    text += f", curated {line.curated}" if line.curated else ""
    return Block((piece("history", "user", text, line),), Drop.HISTORY, line.turn)
