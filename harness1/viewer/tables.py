"""Tables of everything that an episode repeats; other parts refer to the entries by number."""

from __future__ import annotations

from typing import Any

from harness1.env.pieces import Piece
from harness1.env.view import DocumentView, HitView
from harness1.memory.parts import Pool
from harness1.records import Hit, UnitId
from harness1.viewer.passages import Passage
from harness1.viewer.slices import sliced


def is_shared(key: str) -> bool:
    """Return True if a segment is the same in all episodes of a run, which then stores its text once: the static
    prompt, and text of the chat format itself (`=...`)."""
    return key.startswith(("static#", "="))


class Tables:
    """Texts, segments of contexts and prompts, units and passages of one episode; `shared` has the run's texts by
    key."""

    def __init__(self) -> None:
        self.shared: dict[str, str] = {}
        self._texts: dict[str, tuple[int, UnitId | None]] = {}
        self._segments: dict[str, list[Any]] = {}
        self._sent: dict[str, list[Any]] = {}
        self._units: dict[UnitId, list[Any]] = {}
        self._passages: dict[Passage, tuple[int, UnitId]] = {}
        self._chunks: dict[str, int] = {}
        self._about: dict[str, UnitId | None] = {}

    @property
    def passages(self) -> list[Passage]:
        """The shown chunks in the order of their numbers."""
        return list(self._passages)

    def segment(self, piece: Piece, tokens: int) -> int:
        """Return the number of a piece of a context."""
        shows = piece.shows.document if isinstance(piece.shows, HitView) else piece.shows
        about = shows.unit_id if isinstance(shows, DocumentView) else None
        self._about[piece.key] = about
        return self._numbered(self._segments, piece.key, piece.text, piece.role, tokens, about)

    def sent(self, key: str, text: str | None, tokens: int) -> int:
        """Return the number of a segment of a prompt as sent. The text is None if it cannot be decoded."""
        return self._numbered(self._sent, key, text, "", tokens, self._about.get(key))

    def unit(self, unit_id: UnitId) -> int:
        """Return the number of a unit."""
        if unit_id not in self._units:
            self._units[unit_id] = [len(self._units), "", ""]
        number: int = self._units[unit_id][0]
        return number

    def name_unit(self, unit_id: UnitId, title: str) -> None:
        """Give a title to a unit that no search has found."""
        self.unit(unit_id)
        self._units[unit_id][2] = self._units[unit_id][2] or title

    def passage(self, hit: Hit, unit_id: UnitId) -> int:
        """Return the number of a shown chunk, and give its title to its unit."""
        self.name_unit(unit_id, hit.title)
        shown = Passage(hit.chunk_id, hit.doc_id, hit.title, hit.text)
        number, _ = self._passages.setdefault(shown, (len(self._passages), unit_id))
        self._chunks.setdefault(hit.chunk_id, number)
        return number

    def known_chunk(self, chunk_id: str) -> int | str:
        """Return the number of a shown chunk, or the id of one that was not shown."""
        return self._chunks.get(chunk_id, chunk_id)

    def name_handles(self, pool: Pool) -> None:
        """Add the handles and titles of pooled units."""
        for unit_id, entry in pool.entries.items():
            self.unit(unit_id)
            self._units[unit_id][1:] = [entry.handle, entry.title]

    def as_json(self) -> dict[str, Any]:
        """Return all tables in the order of their numbers, without the passages themselves."""
        sources: dict[UnitId | None, list[tuple[int, Passage]]] = {}
        for passage, (number, unit_id) in self._passages.items():
            sources.setdefault(unit_id, []).append((number, passage))
        return {
            "texts": [sliced(text, sources.get(about, ())) for text, (_, about) in self._texts.items()],
            "segments": [[_kind(key), *row[1:]] for key, row in self._segments.items()],
            "sent": [
                [_kind(key), row[2], row[3], self._segments[key][0] if key in self._segments else None]
                for key, row in self._sent.items()
            ],
            "units": [self._unit_row(unit_id, row, sources) for unit_id, row in self._units.items()],
            "chunks": [self.unit(unit_id) for _, unit_id in self._passages.values()],
        }

    def _unit_row(self, unit_id: UnitId, row: list[Any], sources: dict[UnitId | None, list[Any]]) -> list[Any]:
        """Return the handle of a unit and a passage that has its id and its title, or these themselves."""
        _, handle, title = row
        for number, passage in sources.get(unit_id, ()):
            if passage.title == title and unit_id in (passage.doc_id, passage.chunk_id):
                return [handle, number, int(unit_id != passage.doc_id)]
        return [handle, unit_id, title]

    def _numbered(
        self,
        table: dict[str, list[Any]],
        key: str,
        text: str | None,
        role: str,
        tokens: int,
        about: UnitId | None = None,
    ) -> int:
        if key not in table:
            place = None
            if text is not None and is_shared(key):
                self.shared[key] = text
            elif text is not None:
                place = self._text(text, about)
            table[key] = [len(table), role, place, tokens]
        number: int = table[key][0]
        return number

    def _text(self, text: str, about: UnitId | None) -> int:
        return self._texts.setdefault(text, (len(self._texts), about))[0]


def _kind(key: str) -> str:
    """Return a key without its digest, which does not compress, unless a shared text is found by it."""
    return key if is_shared(key) else key.partition("#")[0]
