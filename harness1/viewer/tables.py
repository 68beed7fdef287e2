"""What episodes of a viewer file share, and tables of everything that an episode repeats."""

from __future__ import annotations

import multiprocessing
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, TypeVar

from harness1.env.pieces import Piece
from harness1.env.view import DocumentView, HitView
from harness1.errors import InfrastructureFault
from harness1.memory.parts import Pool
from harness1.records import Hit, UnitId
from harness1.viewer.html import deflate

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 2  # items in progress per worker: enough to keep it busy, and a bound on memory


def map_in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yield results in order, a bounded number in progress. Raises InfrastructureFault: a worker process died."""
    if workers <= 1:
        yield from map(work, items)
        return
    waiting: deque[Future[Result]] = deque()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise InfrastructureFault("a worker process died while episodes were replayed") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


BLOCK = 64  # passages of a block
NUMBER_BYTES = 6  # upper limit of what a reference takes in a file


class Passage(NamedTuple):
    """A chunk as an episode was shown it."""

    chunk_id: str
    doc_id: str
    title: str
    text: str

    @property
    def body(self) -> str:
        """The text to which the stretches of `sliced` refer."""
        return f"{self.title}\n{self.text}"


class Passages:
    """The passages of all episodes of a file, numbered in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[Passage, int] = {}
        self.sizes: list[int] = []  # the most bytes that each takes in a file

    def numbers(self, passages: Sequence[Passage]) -> Sequence[int]:
        """Return the number of each passage; a new one is stored."""
        for passage in passages:
            if passage not in self._numbers:
                self._numbers[passage] = len(self._numbers)
                self.sizes.append(len(deflate(passage)) + NUMBER_BYTES)
        return [self._numbers[passage] for passage in passages]

    def blocks(self, numbers: Sequence[int]) -> Iterable[str]:
        """Yield the content of the tags that hold some passages, in their order."""
        passages = list(self._numbers)
        for start in range(0, len(numbers), BLOCK):
            yield deflate([passages[number] for number in numbers[start : start + BLOCK]])


LEAST = 16  # characters of the shortest stretch worth a reference
_PARTS = re.compile(r"((?<=[.!?:;\]])\s+|\n)")

Parts = list[str | int]


def slice_text(text: str, sources: Sequence[tuple[int, Passage]]) -> str | Parts:
    """Return a text in parts: strings as they are, and three numbers for each stretch of a source: that of the source,
    and of its characters from the first up to, not including, the last; the text itself if there is none. `sources`:
    numbered passages that the text may quote, with their titles."""
    # A page counts in 16-bit units, which are characters where none is beyond U+FFFF.
    bodies = [(number, body) for number, source in sources if (body := source.body).isascii() or max(body) <= "\uffff"]
    title = next((source.title for _, source in sources if source.title), "")
    head, found, tail = text.partition(title) if len(title) >= LEAST else (text, "", "")
    parts, last = Parts(), ""
    for part in filter(None, (*_PARTS.split(head), found, *_PARTS.split(tail))):
        end = parts[-1] if parts else None
        if last and isinstance(end, int) and last.startswith(part, end):
            parts[-1] = end + len(part)
            continue
        held = ((number, body, body.find(part)) for number, body in bodies if part in body)
        if len(part) >= LEAST and (place := next(held, None)):
            number, last, at = place
            parts += [number, at, at + len(part)]
            continue
        last = ""
        if isinstance(end, str):
            parts[-1] = end + part
        else:
            parts.append(part)
    return parts if len(parts) > 1 else text


def is_shared(key: str) -> bool:
    """Return True for a segment of all episodes of a run: the static prompt, and text of the format (`=...`)."""
    return key.startswith(("static#", "="))


class Tables:
    """Texts, segments, units and passages of one episode; `shared` has the run's texts by key."""

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
        self._about[piece.key] = shows.unit_id if isinstance(shows, DocumentView) else None
        return self._number_row(self._segments, piece.key, piece.text, piece.role, tokens)

    def sent_segment(self, key: str, text: str | None, tokens: int) -> int:
        """Return the number of a segment of a prompt as sent. The text is None if it cannot be decoded."""
        return self._number_row(self._sent, key, text, "", tokens)

    def unit(self, unit_id: UnitId) -> int:
        """Return the number of a unit."""
        return int(self._units.setdefault(unit_id, [len(self._units), "", ""])[0])

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

    def chunk(self, chunk_id: str) -> int | str:
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
        units = []
        for unit_id, (_, handle, title) in self._units.items():
            named = [unit_id, title]
            for number, passage in reversed(sources.get(unit_id, ())):
                if passage.title == title and unit_id in (passage.doc_id, passage.chunk_id):
                    named = [number, int(unit_id != passage.doc_id)]
            units.append([handle, *named])
        return {
            "texts": [slice_text(text, sources.get(about, ())) for text, (_, about) in self._texts.items()],
            "segments": [[_kind(key), *row[1:]] for key, row in self._segments.items()],
            "sent": [
                [_kind(key), row[2], row[3], self._segments[key][0] if key in self._segments else None]
                for key, row in self._sent.items()
            ],
            "units": units,
            "chunks": [self.unit(unit_id) for _, unit_id in self._passages.values()],
        }

    def _number_row(self, table: dict[str, list[Any]], key: str, text: str | None, role: str, tokens: int) -> int:
        if key not in table:
            place = None
            if text is not None and is_shared(key):
                self.shared[key] = text
            elif text is not None:
                place = self._texts.setdefault(text, (len(self._texts), self._about.get(key)))[0]
            table[key] = [len(table), role, place, tokens]
        return int(table[key][0])


def _kind(key: str) -> str:
    """Return a key without its digest, which does not compress, unless a shared text is found by it."""
    return key if is_shared(key) else key.partition("#")[0]
