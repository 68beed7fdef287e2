"""The pieces that show the working memory as it is now, each with its drop class."""

from __future__ import annotations

from collections.abc import Set
from itertools import islice

from harness1.config import Env
from harness1.env.render.budget import Block, Drop
from harness1.env.render.evidence_pieces import EvidenceOrder, evidence_pieces, leads_piece, ranked_piece
from harness1.env.render.pieces import Piece, piece
from harness1.env.render.turn_pieces import handle_of
from harness1.env.render.view import (
    CuratedSetView,
    CuratedView,
    DocumentView,
    HistoryView,
    OlderView,
    PoolSizeView,
    VerdictsView,
    VerdictView,
)
from harness1.memory.curated import RANK
from harness1.memory.evidence_value import Assessment
from harness1.memory.history import HistoryLine
from harness1.memory.pool import Entry
from harness1.memory.working_memory import WorkingMemory
from harness1.records import ChunkId, UnitId
from harness1.tools.discovery import shown_title

CLAIM_CHARACTERS = 120


def told_evidence(memory: WorkingMemory, env: Env) -> list[Piece]:
    """Return the evidence order, without reasons, and the leads, even if there are none, where units are ranked."""
    if not env.evidence.ranks:
        return []
    found = memory.assess()
    told = [ranked_piece(memory, env, EvidenceOrder(found), frozenset())] if found.units else []
    return told + ([leads_piece(memory, env, found.leads[: env.leads.lines])] if env.leads_on else [])


class MemoryPieces:
    """Renders the memory, and reuses the lines of documents that did not change."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self._lines: dict[tuple[str, str, ChunkId, str], Block] = {}
        self._turns: dict[HistoryLine, Block] = {}

    def of(self, memory: WorkingMemory, visible: Set[UnitId]) -> list[Block]:
        """Return all sections in order. Documents in `visible` appear in a shown turn and get no pool line."""
        found = memory.assess() if self.env.evidence.ranks else Assessment()
        ranking = EvidenceOrder(found)
        placed = [Block((curated_piece(memory, self.env),))]
        placed += self._curated_lines(memory, visible, ranking)
        if found.units:
            placed.append(Block((ranked_piece(memory, self.env, ranking, visible),), Drop.OLD_TURNS))
        if self.env.leads_on and found.leads:
            placed.append(Block((leads_piece(memory, self.env, found.leads[: self.env.leads.lines]),), Drop.EVIDENCE))
        placed += self._pool(memory, visible, ranking)
        if self.env.evidence.on:
            pieces = evidence_pieces(memory, self.env, found.units)
            placed += [Block((each,), Drop.EVIDENCE) for each in pieces]
        if self.env.verification.on:
            placed += _verdicts(memory, self.env)
        if self.env.history.on:
            placed += self._history(memory)
        return placed

    def _curated_lines(self, memory: WorkingMemory, visible: Set[UnitId], ranking: EvidenceOrder) -> list[Block]:
        hidden = [entry for entry in memory.curated.ranked() if entry.unit_id not in visible]
        if self.env.evidence.ranks:
            hidden.sort(key=lambda entry: (RANK[entry.tag], ranking.places[entry.unit_id]))
        return [self._line(Drop.CURATED_LINES, memory, entry.unit_id, entry.tag, ranking) for entry in hidden]

    def _pool(self, memory: WorkingMemory, visible: Set[UnitId], ranking: EvidenceOrder) -> list[Block]:
        hidden = len(memory.pool.aliases)
        entries, tags = memory.pool.entries, memory.curated.tags
        size = PoolSizeView(len(entries), len(entries) - len(tags), hidden)
        copies = f", {hidden} near duplicates hidden" if self.env.dedup.on else ""
        text = f"Pool: {size.total} documents, {size.uncurated} not curated{copies}."
        placed = [Block((piece("pool", "user", text, size),))]
        order = ranking.units if self.env.evidence.ranks else reversed(entries)
        rest = (unit_id for unit_id in order if unit_id not in visible and unit_id not in tags)
        shown = list(islice(rest, self.env.pool.lines))
        older = list(islice(rest, self.env.pool.older))
        placed += [self._line(Drop.POOL, memory, unit_id, "", ranking) for unit_id in shown]
        left = size.uncurated - sum(unit_id in entries and unit_id not in tags for unit_id in visible) - len(shown)
        if left:
            placed.append(Block((_older(memory, older, left - len(older), self.env),), Drop.OLDER))
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

    def _line(self, drop: Drop, memory: WorkingMemory, unit_id: UnitId, tag: str, ranking: EvidenceOrder) -> Block:
        # In another episode or branch a unit has another handle or another first chunk.
        entry = memory.pool.entries[unit_id]
        reason = ranking.reason(unit_id) if self.env.evidence.ranks else ""
        key = (tag, entry.handle, entry.chunk_ids[0], reason)
        if key not in self._lines:
            self._lines[key] = Block((_document_line(entry, memory, tag, reason, self.env),), drop)
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


def _document_line(entry: Entry, memory: WorkingMemory, tag: str, reason: str, env: Env) -> Piece:
    text = memory.store[entry.chunk_ids[0]].text[: 4 * env.pool.snippet]
    snippet = " ".join(text.split())[: env.pool.snippet].rstrip()
    shown = DocumentView(entry.handle, entry.unit_id, shown_title(entry.title, env), snippet)
    section = "curated" if tag else "pool"
    marks = "; ".join(mark for mark in (tag if env.curation.tags else "", reason) if mark)
    line = f"{entry.handle}{f' ({marks})' if marks else ''} {shown.title}: {snippet}"
    return piece(f"{section}/{entry.handle}", "user", line, shown)


def _older(memory: WorkingMemory, units: list[UnitId], more: int, env: Env) -> Piece:
    handles = tuple(handle_of(memory, unit_id) for unit_id in units)
    label = "Further" if env.evidence.ranks else "Older"
    text = f"{label}: {', '.join(handles)}" + (f" (+{more} more)" if more else "")
    return piece("older", "user", text, OlderView(handles, more))


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
