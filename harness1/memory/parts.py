"""The parts of a working memory that tools write: pool, curated set, verdicts and history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Self

import msgspec

from harness1.config import Curation
from harness1.records import (
    TAGS,
    ChunkId,
    Curated,
    Delta,
    DocId,
    Hit,
    Observation,
    Record,
    Tag,
    ToolCall,
    Unit,
    UnitId,
    Verdict,
)


class Forkable(msgspec.Struct):
    """A part of the state of an episode, as plain data."""

    def fork(self) -> Self:
        """Return an independent copy: dictionaries, lists, buffers and parts are its own, the rest is shared."""
        own: list[Any] = [getattr(self, name) for name in self.__struct_fields__]
        for at, value in enumerate(own):
            if isinstance(value, Forkable | dict | list | bytearray):
                own[at] = value.fork() if isinstance(value, Forkable) else value.copy()
        return type(self)(*own)


class Entry(Record):
    """A pooled unit. Its handle never changes in an episode; near duplicates get neither entry nor handle."""

    unit_id: UnitId
    doc_id: DocId
    handle: str
    title: str
    chunk_ids: tuple[ChunkId, ...]
    turn: int


class Pool(Forkable):
    """Units by id, handles by name, and near duplicates by the unit that represents them."""

    unit: Unit = "document"
    entries: dict[UnitId, Entry] = {}
    numbers: dict[DocId, int] = {}  # the number in the handle of each document, from 1, in order of first appearance
    handles: dict[str, UnitId] = {}
    aliases: dict[UnitId, UnitId] = {}

    def unit_of(self, hit: Hit) -> UnitId:
        return UnitId(hit.doc_id if self.unit == "document" else hit.chunk_id)

    def add(self, hit: Hit, turn: int) -> bool:
        """Pool the unit of a hit, visible from now on, and return whether it is new."""
        unit_id = self.unit_of(hit)
        self.aliases.pop(unit_id, None)
        known = self.entries.get(unit_id)
        if known is None:
            number = self.numbers.setdefault(hit.doc_id, len(self.numbers) + 1)
            handle = f"D{number}" if self.unit == "document" else self.chunk_handle(hit)
            self.entries[unit_id] = Entry(unit_id, hit.doc_id, handle, hit.title, (hit.chunk_id,), turn)
            self.handles[handle] = unit_id
        else:
            self.entries[unit_id] = msgspec.structs.replace(known, chunk_ids=(*known.chunk_ids, hit.chunk_id))
        self.handles[self.chunk_handle(hit)] = unit_id
        return known is None

    def chunk_handle(self, hit: Hit) -> str:
        """Return the handle of a chunk of a pooled document: `D12.3` is the third of number 12."""
        return f"D{self.numbers[hit.doc_id]}.{hit.index + 1}"

    def resolve(self, reference: str) -> UnitId | None:
        """Return the pooled unit that a handle or an exact id names; a duplicate's id names its representative."""
        name = reference.strip().strip("[]")
        found = self.handles.get(name) or self.handles.get(name.upper())
        if found is not None:
            return found
        exact = UnitId(reference)
        if exact in self.entries:
            return exact
        if (twin := self.aliases.get(exact)) or self.unit == "document":
            return twin
        if name[:1].upper() != "D" or not name[1:].isdecimal():
            return None
        # Where chunks are curated, `D12` means the pooled chunk of that document if there is just one.
        wanted = {doc_id for doc_id, number in self.numbers.items() if number == int(name[1:7])}
        units = [entry.unit_id for entry in self.entries.values() if entry.doc_id in wanted]
        return units[0] if len(units) == 1 else None

    def document_of(self, reference: str) -> DocId | None:
        """Return the document that a handle or an exact id belongs to, whichever of its parts are pooled."""
        unit_id = self.resolve(reference)
        if unit_id is not None:
            return self.entries[unit_id].doc_id
        head = reference.strip().strip("[]").upper().partition(".")[0]
        return next((doc_id for doc_id, number in self.numbers.items() if head == f"D{number}"), None)


POPULATED_TAG: Tag = "fair"  # importance of what the harness curates
DEFAULT_TAG: Tag = "fair"
RANK: dict[Tag, int] = {tag: rank for rank, tag in enumerate(TAGS)}


class CuratedSet(Forkable):
    """Tags by unit id, in the order in which units were first added."""

    tags: dict[UnitId, Tag] = {}

    def __len__(self) -> int:
        return len(self.tags)

    def __contains__(self, unit_id: object) -> bool:
        return unit_id in self.tags

    def edit(self, additions: dict[UnitId, Tag], removals: list[UnitId], settings: Curation) -> Delta:
        """Remove entries, then add others in order; adding a present entry only changes its tag. At the cap the first
        of the least important makes room for a more important one (`rank`), the oldest (`fifo`), or none."""
        removed = [unit_id for unit_id in removals if self.tags.pop(unit_id, None) is not None]
        added, retagged = dict[UnitId, Tag](), dict[UnitId, Tag]()
        evicted, refused = list[UnitId](), list[UnitId]()
        for unit_id, tag in additions.items():
            if unit_id in self.tags:
                if self.tags[unit_id] != tag:
                    self.tags[unit_id] = retagged[unit_id] = tag
                continue
            if len(self.tags) >= settings.cap:
                victim = self._find_victim(tag, settings)
                if victim is None:
                    refused.append(unit_id)
                    continue
                del self.tags[victim]
                (evicted if added.pop(victim, None) is None else refused).append(victim)
            self.tags[unit_id] = added[unit_id] = tag
        # Removing a unit and adding it again in one call only changes its place in the order.
        gone, out = ([each for each in units if each not in added] for units in (removed, evicted))
        return Delta(added=added, retagged=retagged, removed=tuple(gone), evicted=tuple(out), refused=tuple(refused))

    def refill(self, units: Sequence[UnitId], tag: Tag) -> Delta:
        before, self.tags = self.tags, dict.fromkeys(units, tag)
        new = tuple(unit_id for unit_id in units if unit_id not in before)
        return Delta(auto_populated=new, removed=tuple(unit_id for unit_id in before if unit_id not in self.tags))

    def in_order(self) -> list[Curated]:
        """Return the delivered order: by importance, then by order of addition."""
        order = sorted(self.tags, key=lambda unit_id: RANK[self.tags[unit_id]])
        return [Curated(unit_id, self.tags[unit_id], rank) for rank, unit_id in enumerate(order, start=1)]

    def _find_victim(self, tag: Tag, settings: Curation) -> UnitId | None:
        if settings.eviction == "fifo":
            return next(iter(self.tags))
        worst = max(RANK[held] for held in self.tags.values())
        if settings.eviction == "refuse" or worst <= RANK[tag]:
            return None
        return next(unit_id for unit_id, held in self.tags.items() if RANK[held] == worst)


class VerificationCache(Forkable):
    """The verdicts of an episode by claim and unit, in order of insertion, as plain data."""

    verdicts: dict[str, Verdict] = {}
    judged: dict[str, int] = {}  # stored chunks of the unit when it was judged

    def get(self, claim: str, unit_id: UnitId, chunks: int = 0) -> Verdict | None:
        """Return the stored verdict of a claim (see `normalise_claim`), unless the unit has gained chunks since."""
        key = f"{normalise_claim(claim)}\n{unit_id}"
        return self.verdicts.get(key) if self.judged.get(key, 0) >= chunks else None

    def put(self, verdict: Verdict, chunks: int = 0) -> None:
        """Store a verdict as the newest, in place of an earlier one. `chunks` counts the unit's stored chunks."""
        key = f"{normalise_claim(verdict.claim)}\n{verdict.unit_id}"
        self.verdicts.pop(key, None)
        self.verdicts[key], self.judged[key] = verdict, chunks

    def recent(self, limit: int) -> tuple[Verdict, ...]:
        return tuple(islice(reversed(self.verdicts.values()), limit))


def normalise_claim(claim: str) -> str:
    """Return what claims that differ in case, white space or final punctuation share."""
    return " ".join(claim.casefold().split()).rstrip(" .!?;:")


SUBJECT_CHARACTERS = 60


class HistoryLine(Record):
    """The effect of one turn. `returned` and `new` count units; `curated` counts additions."""

    turn: int
    tool: str
    subject: str
    returned: int = 0
    new: int = 0
    curated: int = 0


def history_line(turn: int, pool: Pool, call: ToolCall, observation: Observation) -> HistoryLine:
    """Sum up an action and its observation."""
    delta = observation.delta
    returned = len({pool.unit_of(hit) for hit in observation.hits}) or len(observation.verdicts)
    curated = len(delta.added) + len(delta.auto_populated)
    return HistoryLine(turn, observation.tool, subject(call), returned, len(delta.new), curated)


SUBJECTS = ("query", "queries", "pattern", "claim", "doc_id", "doc_ids", "add_ids", "remove_ids", "reasoning")
"""Arguments that say what a call is about; the first that a call has."""


def telling_argument(call: ToolCall) -> Any:
    """Return the argument that says what a call is about, or an empty text."""
    return next((value for key in SUBJECTS if (value := call.arguments.get(key))), "")


def subject(call: ToolCall) -> str:
    """Return the argument that says what a call was about, cut to one short line."""
    value = telling_argument(call)
    if isinstance(value, list):
        value = "; ".join(str(part)[:30] for part in value[:3])
    return " ".join(str(value)[: 4 * SUBJECT_CHARACTERS].split())[:SUBJECT_CHARACTERS]
