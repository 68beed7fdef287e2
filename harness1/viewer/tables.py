"""Tables of everything that an episode repeats; other parts refer to the entries by number."""

from __future__ import annotations

from typing import Any

from harness1.env.render.pieces import Piece
from harness1.env.render.view import DocumentView, HitView
from harness1.memory.pool import Pool
from harness1.records import Hit, UnitId


def is_shared(key: str) -> bool:
    """Return True if a segment is the same in all episodes of a run, which then stores its text once: the static
    prompt, and text of the chat format itself (`=...`)."""
    return key.startswith(("static#", "="))


class Tables:
    """Texts, segments of contexts and prompts, units and chunks of one episode; `shared` has the run's texts by key."""

    def __init__(self) -> None:
        self.shared: dict[str, str] = {}
        self._texts: dict[str, int] = {}
        self._about: list[int] = []
        self._segments: dict[str, list[Any]] = {}
        self._sent: dict[str, list[Any]] = {}
        self._units: dict[UnitId, list[Any]] = {}
        self._chunks: dict[str, tuple[int, int]] = {}

    def text(self, text: str, about: UnitId | None = None) -> int:
        """Return the number of a text, which may be about a unit."""
        if text not in self._texts:
            self._texts[text] = len(self._texts)
            self._about.append(-1 if about is None else self.unit(about))
        return self._texts[text]

    def segment(self, piece: Piece, tokens: int) -> int:
        """Return the number of a piece of a context."""
        shows = piece.shows.document if isinstance(piece.shows, HitView) else piece.shows
        about = shows.unit_id if isinstance(shows, DocumentView) else None
        return self._numbered(self._segments, piece.key, piece.text, piece.role, tokens, about)

    def sent(self, key: str, text: str | None, tokens: int) -> int:
        """Return the number of a segment of a prompt as sent. The text is None if it cannot be decoded."""
        return self._numbered(self._sent, key, text, "", tokens)

    def unit(self, unit_id: UnitId) -> int:
        """Return the number of a unit."""
        if unit_id not in self._units:
            self._units[unit_id] = [len(self._units), unit_id, "", ""]
        number: int = self._units[unit_id][0]
        return number

    def chunk(self, hit: Hit, unit_id: UnitId) -> int:
        """Return the number of a shown chunk, and give its title to its unit."""
        unit = self.unit(unit_id)
        self._units[unit_id][3] = self._units[unit_id][3] or hit.title
        return self._chunks.setdefault(hit.chunk_id, (len(self._chunks), unit))[0]

    def known_chunk(self, chunk_id: str) -> int | str:
        """Return the number of a shown chunk, or the id of one that was not shown."""
        return self._chunks[chunk_id][0] if chunk_id in self._chunks else chunk_id

    def name_handles(self, pool: Pool) -> None:
        """Add the handles and titles of pooled units."""
        for unit_id, entry in pool.entries.items():
            self.unit(unit_id)
            self._units[unit_id][2:] = [entry.handle, entry.title]

    def as_json(self) -> dict[str, Any]:
        """Return all tables in the order of their numbers, except for texts, whose numbers are in `order`.

        Texts about one unit are adjacent, because deflate finds repetitions only within 32 KiB.
        """
        texts = list(self._texts)
        order = sorted(range(len(texts)), key=self._about.__getitem__)
        return {
            "texts": [texts[number] for number in order],
            "order": order,
            "segments": [[_kind(key), *row[1:]] for key, row in self._segments.items()],
            "sent": [
                [_kind(key), row[2], row[3], self._segments[key][0] if key in self._segments else None]
                for key, row in self._sent.items()
            ],
            "units": [row[1:] for row in self._units.values()],
            "chunks": [[chunk_id, unit] for chunk_id, (_, unit) in self._chunks.items()],
        }

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
                place = self.text(text, about)
            table[key] = [len(table), role, place, tokens]
        number: int = table[key][0]
        return number


def _kind(key: str) -> str:
    """Return a key without its digest, which does not compress, unless a shared text is found by it."""
    return key if is_shared(key) else key.partition("#")[0]
