"""Texts as stretches of other texts: what a context quotes from a document is not stored a second time."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness1.viewer.passages import Passage

LEAST = 16
"""Characters of the shortest stretch worth a reference."""
_PARTS = re.compile(r"((?<=[.!?:;\]])\s+|\n)")

Parts = list[str | int]


def sliced(text: str, sources: Sequence[tuple[int, Passage]]) -> str | Parts:
    """Return a text in parts: strings as they are, and three numbers for each stretch of a source.

    The numbers are those of the source and of its characters from the first up to, not including, the last. Without
    any such stretch, the text itself is returned.

    Args:
        sources: passages that the text may quote, with their numbers; titles are found too.
    """
    # A page counts in 16-bit units, which are characters where none is beyond U+FFFF.
    bodies = [(number, body) for number, source in sources if (body := source.body).isascii() or max(body) <= "\uffff"]
    writer = _Writer(bodies)
    title = next((source.title for _, source in sources if source.title), "")
    head, found, tail = text.partition(title) if len(title) >= LEAST else ("", "", text)
    for part in (*_PARTS.split(head), found, *_PARTS.split(tail)) if found else _PARTS.split(text):
        writer.add(part)
    return writer.parts if len(writer.parts) > 1 else text


class _Writer:
    """Parts as they are found; a stretch grows as long as its source goes on in the same way."""

    def __init__(self, sources: Sequence[tuple[int, str]]) -> None:
        self.parts: Parts = []
        self._sources = sources
        self._last = ""

    def add(self, part: str) -> None:
        if not part or self._grown(part) or (len(part) >= LEAST and self._found(part)):
            return
        if self.parts and isinstance(self.parts[-1], str):
            self.parts[-1] += part
        else:
            self.parts.append(part)
        self._last = ""

    def _grown(self, part: str) -> bool:
        end = self.parts[-1] if self.parts else None
        if not self._last or not isinstance(end, int) or not self._last.startswith(part, end):
            return False
        self.parts[-1] = end + len(part)
        return True

    def _found(self, part: str) -> bool:
        for number, body in self._sources:
            if (at := body.find(part)) >= 0:
                self.parts += [number, at, at + len(part)]
                self._last = body
                return True
        return False
