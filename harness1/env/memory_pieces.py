"""The pieces that show the finished turns, made once and never changed, and the working memory as it is now.

Text from outside is written so that nobody takes it for words of the environment. Each line of the environment begins
with a visible character, each line of a document with a space. A title shares its line with marks of the environment:
what looks like one is escaped in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import lru_cache
from itertools import islice

import msgspec

from harness1.config import Env
from harness1.env.pieces import Block, Drop, Piece, action_piece, piece, sentence, write_action
from harness1.env.view import (
    ActionView,
    ChangesView,
    CuratedView,
    DocumentView,
    HitView,
    JudgementView,
    LeadView,
    MemoryView,
    TurnView,
)
from harness1.memory.entities import SCANNED
from harness1.memory.parts import RANK, HistoryLine
from harness1.memory.ranking import Assessment, Lead
from harness1.memory.working_memory import WorkingMemory, bridge_documents, rare_bridges
from harness1.plain import counted
from harness1.records import ChunkId, Hit, Observation, Tag, Turn, UnitId
from harness1.tools.discovery import show_text, show_title
from harness1.tools.documents import passages_left_out
from harness1.tools.tool import Traits

QUERIES_CHARACTERS, QUERY_CHARACTERS = 1000, 200  # if all queries exceed the first length, each is cut to the second
PASSAGE_CHARACTERS = 300  # characters shown of the passage that a verdict rests on
VERDICTS = 8  # verdicts shown in the memory, newest first
CLAIM_CHARACTERS = 120
LEAD_SOURCES = 3  # documents that are shown to name a lead
LINKING = 5  # bridge documents that are shown
# In a title: brackets of handles, reasons before a title, places in rankings, and the number of copies.
_MARK = re.compile(r"\\|\[|\]|^\(|\bq\d+(?=#\d)|\balso(?=: \d)")
_ENTITY = re.compile(r"\((?=E\d+\))")


def indent(text: str) -> str:
    """Return a text with each line, by any of Unicode's ends of lines, behind a space."""
    return "\n".join(f" {line}" for line in text.splitlines())


@lru_cache(maxsize=1024)  # a document has a line in many turns
def escape_title(title: str) -> str:
    """Return a title with a backslash before each backslash and before whatever looks like a mark beside a title."""
    return _MARK.sub(r"\\\g<0>", title)


def escape_handles(text: str) -> str:
    """Return a text with a backslash before whatever looks like the handle of an entity behind its name."""
    return _ENTITY.sub(r"\\(", text)


class TurnPieces(msgspec.Struct, frozen=True):
    """The pieces of a turn. `action` and `head` stay together; `hits` may be dropped unless the turn is the last."""

    turn: int
    action: Piece
    head: Piece
    hits: tuple[Piece, ...]

    def pieces(self) -> tuple[Piece, ...]:
        return (self.action, self.head, *self.hits)


def turn_pieces(memory: WorkingMemory, env: Env, turn: Turn, traits: Traits) -> TurnPieces:
    """Split a finished turn into pieces; the memory is the one after the turn, the traits are those of its tool."""
    assert turn.action is not None
    assert turn.observation is not None
    told, called = write_action(turn.reasoning, turn.action)
    sampled = turn.calls[-1] if turn.calls and turn.calls[-1].output_ids else None
    action = action_piece(turn.index, told, ActionView(turn.index, called), sampled)
    hits = _hits(memory, env, turn.index, turn.observation, traits)
    return TurnPieces(turn.index, action, _head(memory, env, turn.index, turn.observation), hits)


def _head(memory: WorkingMemory, env: Env, turn: int, observation: Observation) -> Piece:
    queries = [" ".join(ranking.query.split()) for ranking in observation.rankings]
    if sum(map(len, queries)) > QUERIES_CHARACTERS:
        queries = [query[:QUERY_CHARACTERS].rstrip() for query in queries]
    # A single query is shown too, because an epoch opens with the observation, without the action before it.
    single = f": {queries[0]}" if len(queries) == 1 else ""
    lines = [f"Turn {turn}: {observation.tool}{single}"]
    for note in filter(None, (observation.error, *observation.notes)):
        outside = env.has("marks") and note.code == "said"
        lines.append(indent(sentence(note)) if outside else sentence(note))
    if len(queries) > 1:
        lines += [f"q{number}: {query}" for number, query in enumerate(queries, start=1)]
    verdicts = []
    for verdict in observation.verdicts:
        passage = " ".join(verdict.sentence.split())[:PASSAGE_CHARACTERS].rstrip()
        each = JudgementView(handle_of(memory, verdict.unit_id), verdict.label, passage, verdict.cached)
        lines.append(f"{each.handle} {each.label}{' (known)' * each.known}{f': {passage}' if passage else ''}")
        verdicts.append(each)

    def tagged(tags: dict[UnitId, Tag]) -> dict[str, Tag | None]:
        return {handle_of(memory, unit_id): tag if env.has("tags") else None for unit_id, tag in tags.items()}

    def handles(units: Iterable[UnitId]) -> tuple[str, ...]:
        return tuple(handle_of(memory, unit_id) for unit_id in units)

    delta = observation.delta
    changes = ChangesView(
        added=tagged(delta.added),
        retagged=tagged(delta.retagged),
        removed=handles(delta.removed),
        evicted=handles(delta.evicted),
        refused=handles(delta.refused),
        copied=tuple(sorted(set(handles(delta.aliases.values())))),
        pruned=handles(delta.pruned),
    )
    evicted = "Evicted for more important ones" if env.curation.eviction == "rank" else "Evicted"
    labels = "Added", "Re-tagged", "Removed", evicted, "Refused, the set is full", "Hidden copies of", "Pruned"
    for label, names in zip(labels, msgspec.structs.astuple(changes), strict=True):
        tags: dict[str, Tag | None] = names if isinstance(names, dict) else {}
        words = [f"{name} {tags[name]}" if tags.get(name) else name for name in names]
        lines += [f"{label}: {', '.join(words)}."] * bool(words)
    notes, error = observation.notes, observation.error
    shown = TurnView(turn, observation.tool, tuple(queries), notes, error, tuple(verdicts), changes)
    return piece(f"turn/{turn}", "tool", "\n".join(lines), shown)


def _hits(memory: WorkingMemory, env: Env, turn: int, observation: Observation, traits: Traits) -> tuple[Piece, ...]:
    places: dict[str, list[tuple[int, int]]] = {}
    queries = len(observation.rankings)
    for query, ranking in enumerate(observation.rankings):
        for rank, chunk_id in enumerate(ranking.chunk_ids):
            places.setdefault(chunk_id, []).append((query, rank))
    copies = list(observation.delta.aliases.values())
    left_out = passages_left_out(observation, env)
    pool, pieces = memory.pool, list[Piece]()
    for hit, words in hit_words(memory, env, observation, traits):
        unit_id = pool.unit_of(hit)
        entry = pool.entries[unit_id]
        title, _, text = words.partition("\n")
        entities = dict[str, str]()
        if env.has("entity_handles"):
            words = escape_handles(words) if env.has("marks") else words
            words, entities = memory.entities.mark(words, SCANNED)
        document = DocumentView(entry.handle, unit_id, title, text)
        found_by = ((0, len(pieces)),) if queries == 1 else tuple(places.get(hit.chunk_id, ()))
        skipped, hidden = left_out.get(hit.chunk_id, 0), copies.count(unit_id)
        label = pool.chunk_handle(hit) if hit.index or len(entry.chunk_ids) > 1 else entry.handle
        marks = [f"q{query + 1}#{rank + 1}" for query, rank in found_by] if queries > 1 else []
        if hidden:
            marks.append(f"also: {hidden} copies" if hidden > 1 else "also: 1 copy")
        title, _, text = words.partition("\n")
        if env.has("marks"):
            title, text = escape_title(title), indent(text)
        line = " ".join(part for part in (f"[{label}]", title, *marks) if part)
        if skipped:
            first = f"D{pool.numbers[hit.doc_id]}.{hit.index + 1 - skipped}"
            line = f"[{counted(skipped, 'passage')} left out: read {first}]\n{line}"
        shown = HitView(turn, document, found_by, hidden, skipped, entities)
        pieces.append(piece(f"hit/{turn}", "tool", f"{line}\n{text}", shown))
    return tuple(pieces)


def hit_words(memory: WorkingMemory, env: Env, observation: Observation, traits: Traits) -> Iterator[tuple[Hit, str]]:
    """Yield the shown hits of an observation, each with its title, a line end and its shown text."""
    for hit in observation.hits:
        unit_id = memory.pool.unit_of(hit)
        if unit_id in memory.pool.entries and unit_id not in observation.delta.aliases:
            yield hit, f"{show_title(hit.title, env)}\n{show_text(hit, traits, observation.rankings, env)}"


def handle_of(memory: WorkingMemory, unit_id: UnitId) -> str:
    """Return the handle of a pooled unit."""
    return memory.pool.entries[unit_id].handle


def order_piece(memory: WorkingMemory, env: Env, found: Assessment, visible: Set[UnitId]) -> Piece:
    """Return the evidence order by handle. Only units without a line of their own come with a reason here."""
    shown = found.units[: env.evidence.lines]
    handles = tuple(handle_of(memory, unit_id) for unit_id in shown)
    words = []
    for handle, unit_id in zip(handles, shown, strict=True):
        reason = found.reasons[unit_id] if unit_id in visible else ""
        words.append(f"{handle} ({reason})" if reason else handle)
    return piece("ranked", "user", f"By evidence: {', '.join(words)}.", MemoryView(ranked=handles))


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
        if env.rendering.instructions == "plain":
            words.append(name)
            continue
        source = f"named by {', '.join(handles)}" if handles else "named in the question"
        told = ["part of the question"] if lead.is_part else [shown[-1].entity, source, "not found yet"]
        words.append(f"{name} ({'; '.join(filter(None, told))})")
    said = "; ".join(words) or "nothing is open"
    return piece("leads", "user", f"Search next: {said}.", MemoryView(leads=tuple(shown)))


def link_pieces(memory: WorkingMemory, env: Env, order: Sequence[UnitId]) -> Iterator[Piece]:
    """Yield what links documents: where units are ranked, bridge documents and rare names; else the shared entities."""
    if env.ranks:
        links = [
            f"{handle_of(memory, unit_id)} links {', '.join(names[:-1])} and {names[-1]}"
            for unit_id, names in bridge_documents(memory, order, LINKING)
        ]
        if links:
            yield piece("links", "user", f"Bridge documents: {'; '.join(links)}.")
        shared = rare_bridges(memory, order, *env.evidence.shared)
    else:
        shared = memory.evidence.bridges(*env.evidence.shared)
    alone, words = memory.evidence.singletons, []
    for bridge in shared:
        more = bridge.total - len(bridge.unit_ids)
        handles = ", ".join(handle_of(memory, unit_id) for unit_id in bridge.unit_ids)
        words.append(f"{bridge.entity} ({handles}{f' +{more} more' if more else ''})")
    if words or alone:
        listed = "; ".join(words) or "none"
        yield piece("evidence", "user", f"Shared entities: {listed}. In one document only: {alone}.")


def order_and_leads(memory: WorkingMemory, env: Env) -> list[Piece]:
    """Return the evidence order, without reasons, and the leads, even if there are none, where units are ranked."""
    if not env.ranks:
        return []
    found = memory.assess()
    told = [order_piece(memory, env, found, frozenset())] if found.units else []
    return told + ([leads_piece(memory, env, memory.shown_leads(env))] if env.leads_on else [])


class MemoryPieces:
    """Renders the memory, and reuses the lines of documents that did not change."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self._lines: dict[tuple[str, str, ChunkId, str], Block] = {}

    def of(self, memory: WorkingMemory, visible: Set[UnitId]) -> list[Block]:
        """Return all sections in order. Documents in `visible` appear in a shown turn and get no pool line."""
        env = self.env
        if env.rendering.instructions == "plain" and not memory.turn:
            return []  # Small models make a query of whatever they see beside the question, such as `Curated 0/30`.
        found = memory.assess() if env.ranks else Assessment()
        hidden = [entry for entry in memory.curated.in_order() if entry.unit_id not in visible]
        if env.ranks:
            hidden.sort(key=lambda entry: (RANK[entry.tag], found.places[entry.unit_id]))
        placed = [Block((set_piece(memory, env),))]
        placed += [self._line(Drop.CURATED_LINES, memory, entry.unit_id, entry.tag, found) for entry in hidden]
        if found.units:
            placed.append(Block((order_piece(memory, env, found, visible),), Drop.OLD_TURNS))
        if env.leads_on and (leads := memory.shown_leads(env)):
            placed.append(Block((leads_piece(memory, env, leads),), Drop.EVIDENCE))
        placed += self._pool(memory, visible, found)
        if env.has("evidence"):
            placed += [Block((each,), Drop.EVIDENCE) for each in link_pieces(memory, env, found.units)]
        if env.has("verification") and (recent := memory.verification.recent(VERDICTS)):
            verdicts = [
                JudgementView(handle_of(memory, seen.unit_id), seen.label, claim=seen.claim[:CLAIM_CHARACTERS].rstrip())
                for seen in recent
            ]
            lines = ["Verified:", *(f"{seen.handle} {seen.label}: {seen.claim}" for seen in verdicts)]
            told = piece("verdicts", "user", "\n".join(lines), MemoryView(verdicts=tuple(verdicts)))
            placed.append(Block((told,), Drop.EVIDENCE))
        if env.has("history") and (turns := memory.history[-env.history.lines :]):
            earlier = len(memory.history) - len(turns)
            opening = f"History, {earlier} earlier turns left out:" if earlier else "History:"
            placed.append(Block((piece("history", "user", opening),), Drop.HISTORY, memory.turn))
            placed += map(_history_block, turns)
        return placed

    def _pool(self, memory: WorkingMemory, visible: Set[UnitId], found: Assessment) -> list[Block]:
        entries, tags = memory.pool.entries, memory.curated.tags
        uncurated = len(entries) - len(tags)
        copies = f", {len(memory.pool.aliases)} near duplicates hidden" if self.env.has("dedup") else ""
        text = f"Pool: {len(entries)} documents, {uncurated} not curated{copies}."
        placed = [Block((piece("pool", "user", text),))]
        order = found.units if self.env.ranks else reversed(entries)
        rest = (unit_id for unit_id in order if unit_id not in visible and unit_id not in tags)
        shown = list(islice(rest, self.env.pool.lines))
        older = list(islice(rest, self.env.pool.older))
        placed += [self._line(Drop.POOL, memory, unit_id, "", found) for unit_id in shown]
        left = uncurated - sum(unit_id in entries and unit_id not in tags for unit_id in visible) - len(shown)
        if left:
            label = "Further" if self.env.ranks else "Older"
            handles = ", ".join(handle_of(memory, unit_id) for unit_id in older)
            more = f" (+{left - len(older)} more)" if left > len(older) else ""
            placed.append(Block((piece("older", "user", f"{label}: {handles}{more}"),), Drop.OLDER))
        return placed

    def _line(self, drop: Drop, memory: WorkingMemory, unit_id: UnitId, tag: str, found: Assessment) -> Block:
        # In another episode or branch a unit has another handle or another first chunk.
        entry = memory.pool.entries[unit_id]
        reason = found.reasons[unit_id] if self.env.ranks else ""
        key = (tag, entry.handle, entry.chunk_ids[0], reason)
        if key not in self._lines:
            text = memory.store[entry.chunk_ids[0]].text[: 4 * self.env.pool.snippet]
            snippet = " ".join(text.split())[: self.env.pool.snippet].rstrip()
            shown = DocumentView(entry.handle, entry.unit_id, show_title(entry.title, self.env), snippet)
            title = escape_title(shown.title) if self.env.has("marks") else shown.title
            marks = "; ".join(mark for mark in (tag if self.env.has("tags") else "", reason) if mark)
            line = f"{entry.handle}{f' ({marks})' if marks else ''} {title}: {snippet}"
            section = "curated" if tag else "pool"
            self._lines[key] = Block((piece(f"{section}/{entry.handle}", "user", line, shown),), drop)
        return self._lines[key]


@lru_cache(maxsize=1024)
def _history_block(line: HistoryLine) -> Block:
    text = f"T{line.turn} {line.tool} ({line.subject}): returned {line.returned}, new {line.new}"
    text += f", curated {line.curated}" if line.curated else ""
    return Block((piece("history", "user", text),), Drop.HISTORY, line.turn)


def set_piece(memory: WorkingMemory, env: Env) -> Piece:
    """Return the whole curated set by handle: the smallest form of the memory, which is never dropped."""
    entries, groups = list[CuratedView](), dict[str, list[str]]()
    for entry in memory.curated.in_order():
        tag = entry.tag if env.has("tags") else None
        entries.append(CuratedView(handle_of(memory, entry.unit_id), entry.unit_id, tag))
        groups.setdefault(tag or "all", []).append(entries[-1].handle)
    listed = "; ".join(f"{tag}: {', '.join(handles)}" for tag, handles in groups.items())
    text = f"Curated {len(entries)}/{env.curation.cap}. {listed or 'Nothing yet.'}"
    return piece("curated", "user", text, MemoryView(cap=env.curation.cap, curated=tuple(entries)))
