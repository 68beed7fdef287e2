"""The pieces that show the finished turns and the working memory.

Those of a turn are made once, when it ends, and never change: the policy's output, the head of the observation, and one
piece for each hit. Those of the memory show it as it is now, each with its drop class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cached_property
from itertools import islice

import msgspec

from harness1.config import Env
from harness1.env.pieces import Block, Drop, Piece, action_piece, action_text, cut_call, piece, sentence
from harness1.env.view import (
    ActionView,
    BridgesView,
    BridgeView,
    ChangesView,
    CuratedSetView,
    CuratedView,
    DocumentView,
    HistoryView,
    HitView,
    JudgementView,
    LeadsView,
    LeadView,
    LinksView,
    LinkView,
    OlderView,
    PoolSizeView,
    RankedView,
    TurnView,
    VerdictsView,
    VerdictView,
)
from harness1.memory.parts import RANK, Entry, HistoryLine
from harness1.memory.ranking import Assessment, Lead
from harness1.memory.working_memory import WorkingMemory, bridge_documents, rare_bridges
from harness1.plain import counted
from harness1.records import ChunkId, Delta, Hit, Observation, Ranking, Tag, Turn, UnitId, Verdict
from harness1.tools.discovery import show_text, show_title
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
    called = ActionView(turn.index, cut_call(turn.action)) if turn.action else None
    call = turn.calls[-1] if turn.calls and turn.calls[-1].output_ids else None
    action = action_piece(turn.index, action_text(turn.reasoning, turn.action), called, call)
    hits = _hits(memory, env, turn.index, turn.observation, traits)
    return TurnPieces(turn.index, action, _head(memory, env, turn.index, turn.observation), hits)


def _head(memory: WorkingMemory, env: Env, turn: int, observation: Observation) -> Piece:
    shown = TurnView(
        turn=turn,
        tool=observation.tool,
        queries=cut_queries(observation.rankings),
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


def cut_queries(rankings: Sequence[Ranking]) -> tuple[str, ...]:
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
        ("Added", _tag_words(shown.added)),
        ("Re-tagged", _tag_words(shown.retagged)),
        ("Removed", shown.removed),
        ("Evicted for more important ones" if env.curation.eviction == "rank" else "Evicted", shown.evicted),
        ("Refused, the set is full", shown.refused),
        ("Hidden copies of", shown.copied),
        ("Pruned", shown.pruned),
    )
    return [f"{label}: {', '.join(names)}." for label, names in groups if names]


def _tag_words(tags: dict[str, Tag | None]) -> list[str]:
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
    for hit, words in hit_words(memory, env, observation, traits):
        unit_id = memory.pool.unit_of(hit)
        title, _, text = words.partition("\n")
        marked, entities = memory.entities.mark(words, env.evidence.characters) if names else (words, {})
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


def hit_words(memory: WorkingMemory, env: Env, observation: Observation, traits: Traits) -> Iterator[tuple[Hit, str]]:
    """Yield the shown hits of an observation, each with its title, a line end and its shown text."""
    for hit in observation.hits:
        unit_id = memory.pool.unit_of(hit)
        if unit_id in memory.pool.entries and unit_id not in observation.delta.aliases:
            yield hit, f"{show_title(hit.title, env)}\n{show_text(hit, traits, observation.rankings, env)}"


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


LEAD_SOURCES = 3
"""Documents that are shown to name a lead."""
LINKING = 5
"""Bridge documents that are shown."""


class EvidenceOrder:
    """The evidence order of one state, with the place of every unit."""

    def __init__(self, found: Assessment) -> None:
        self.units, self._found = found.units, found

    @cached_property
    def places(self) -> dict[UnitId, int]:
        return {unit_id: place for place, unit_id in enumerate(self.units)}

    @cached_property
    def _reasons(self) -> list[str]:
        return self._found.reasons()

    def reason(self, unit_id: UnitId) -> str:
        """Return in a few words what speaks most for a unit, or an empty string."""
        return self._reasons[self.places[unit_id]]


def order_piece(memory: WorkingMemory, env: Env, ranking: EvidenceOrder, visible: Set[UnitId]) -> Piece:
    """Return the evidence order by handle. Only units without a line of their own come with a reason here."""
    shown = ranking.units[: env.evidence.lines]
    handles = tuple(handle_of(memory, unit_id) for unit_id in shown)
    words = []
    for handle, unit_id in zip(handles, shown, strict=True):
        reason = ranking.reason(unit_id) if unit_id in visible else ""
        words.append(f"{handle} ({reason})" if reason else handle)
    return piece("ranked", "user", f"By evidence: {', '.join(words)}.", RankedView(handles))


def leads_piece(memory: WorkingMemory, env: Env, leads: Sequence[Lead]) -> Piece:
    """Return what is worth a search, with handles and reasons; under minimal instructions, with handles alone."""
    shown, words = [], []
    for lead in leads:
        name = " ".join(lead.name.split())
        handles = tuple(handle_of(memory, unit_id) for unit_id in lead.sources[:LEAD_SOURCES])
        shown.append(LeadView(name, handles, memory.entities.handle_of(name)))
        if env.rendering.instructions == "minimal":
            source = f" ({', '.join(handles)})" if handles else ""
            words.append(f"{shown[-1].entity} {name}{source}".strip())
            continue
        source = f"named by {', '.join(handles)}" if handles else "named in the question"
        told = ["part of the question"] if lead.is_part else [shown[-1].entity, source, "not found yet"]
        words.append(f"{name} ({'; '.join(filter(None, told))})")
    said = "; ".join(words) or "nothing is open"
    return piece("leads", "user", f"Search next: {said}.", LeadsView(tuple(shown)))


def evidence_pieces(memory: WorkingMemory, env: Env, order: Sequence[UnitId]) -> list[Piece]:
    """Return what links documents: the bridge documents, where units are ranked in an `order`, and shared entities."""
    links = _links_piece(memory, order) if env.evidence.ranks else None
    return [each for each in (links, _bridges_piece(memory, env, order)) if each is not None]


def _links_piece(memory: WorkingMemory, order: Sequence[UnitId]) -> Piece | None:
    links = tuple(
        LinkView(handle_of(memory, bridge.unit_id), bridge.names) for bridge in bridge_documents(memory, order, LINKING)
    )
    words = [f"{link.handle} links {', '.join(link.names[:-1])} and {link.names[-1]}" for link in links]
    return piece("links", "user", f"Bridge documents: {'; '.join(words)}.", LinksView(links)) if links else None


def _bridges_piece(memory: WorkingMemory, env: Env, order: Sequence[UnitId]) -> Piece | None:
    """Return the shared entities: the most frequent ones, or, where units are ranked, those that lead on from the
    best. None where no entity is known."""
    if env.evidence.ranks:
        found = rare_bridges(memory, order, env.evidence.entities, env.evidence.documents)
    else:
        found = memory.evidence.bridges(env.evidence.entities, env.evidence.documents)
    if not found and not memory.evidence.singletons:
        return None
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
    return piece("evidence", "user", text, BridgesView(tuple(bridges), memory.evidence.singletons))


CLAIM_CHARACTERS = 120


def order_and_leads(memory: WorkingMemory, env: Env) -> list[Piece]:
    """Return the evidence order, without reasons, and the leads, even if there are none, where units are ranked."""
    if not env.evidence.ranks:
        return []
    found = memory.assess()
    told = [order_piece(memory, env, EvidenceOrder(found), frozenset())] if found.units else []
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
        placed = [Block((set_piece(memory, self.env),))]
        placed += self._curated_lines(memory, visible, ranking)
        if found.units:
            placed.append(Block((order_piece(memory, self.env, ranking, visible),), Drop.OLD_TURNS))
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
        hidden = [entry for entry in memory.curated.in_order() if entry.unit_id not in visible]
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


def set_piece(memory: WorkingMemory, env: Env) -> Piece:
    """Return the whole curated set by handle: the smallest form of the memory, which is never dropped."""
    entries = tuple(
        CuratedView(handle_of(memory, entry.unit_id), entry.unit_id, entry.tag if env.curation.tags else None)
        for entry in memory.curated.in_order()
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
    shown = DocumentView(entry.handle, entry.unit_id, show_title(entry.title, env), snippet)
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
