"""The candidate pool: every unit found so far, in order of first appearance, with its handle."""

from __future__ import annotations

import msgspec

from harness1.memory.forkable import Forkable
from harness1.records import ChunkId, DocId, Hit, Record, Unit, UnitId


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
    numbers: dict[DocId, int] = {}
    """The number in the handle of each document, from 1, in order of first appearance."""
    handles: dict[str, UnitId] = {}
    aliases: dict[UnitId, UnitId] = {}

    def unit_of(self, hit: Hit) -> UnitId:
        """Return the id under which a hit is pooled and curated."""
        return UnitId(hit.doc_id if self.unit == "document" else hit.chunk_id)

    def add(self, hit: Hit, turn: int) -> bool:
        """Pool the unit of a hit, and return whether it is new. A unit that was hidden as a duplicate becomes
        visible."""
        unit_id = self.unit_of(hit)
        self.aliases.pop(unit_id, None)
        known = self.entries.get(unit_id)
        if known is not None:
            chunk_ids = (*known.chunk_ids, hit.chunk_id)
            self.entries[unit_id] = msgspec.structs.replace(known, chunk_ids=chunk_ids)
            self.handles[self.chunk_handle(hit)] = unit_id
            return False
        number = self.numbers.setdefault(hit.doc_id, len(self.numbers) + 1)
        handle = f"D{number}" if self.unit == "document" else self.chunk_handle(hit)
        self.entries[unit_id] = Entry(unit_id, hit.doc_id, handle, hit.title, (hit.chunk_id,), turn)
        self.handles[handle] = unit_id
        self.handles[self.chunk_handle(hit)] = unit_id
        return True

    def chunk_handle(self, hit: Hit) -> str:
        """Return the handle of a chunk: `D12.3` is the third chunk of the document with number 12, which must be
        pooled."""
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
        return self.aliases.get(exact) or self._only_chunk_of(name)

    def document_of(self, reference: str) -> DocId | None:
        """Return the document that a handle or an exact id belongs to, whichever of its parts are pooled."""
        unit_id = self.resolve(reference)
        if unit_id is not None:
            return self.entries[unit_id].doc_id
        head = reference.strip().strip("[]").upper().partition(".")[0]
        return next((doc_id for doc_id, number in self.numbers.items() if head == f"D{number}"), None)

    def _only_chunk_of(self, name: str) -> UnitId | None:
        """Return the pooled chunk of a document if there is just one: where chunks are curated, `D12` means that."""
        if self.unit == "document" or name[:1].upper() != "D" or not name[1:].isdecimal():
            return None
        wanted = {doc_id for doc_id, number in self.numbers.items() if number == int(name[1:7])}
        units = [entry.unit_id for entry in self.entries.values() if entry.doc_id in wanted]
        return units[0] if len(units) == 1 else None
