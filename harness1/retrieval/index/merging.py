"""Which segments of an index to write as one: adjacent small ones, as Lucene's log-merge policy does, and mostly dead
ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from harness1.retrieval.index.index import SegmentEntry

MERGE = 8
"""The least number of adjacent segments that are merged, if none is larger than the others together."""
MOST = 16
"""The most segments that may stay below full size; every search visits each of them."""
LARGEST = 1 << 18
"""The most chunks in a segment, which is then full."""


def to_merge(entries: Sequence[SegmentEntry]) -> range | None:
    """Return the next adjacent segments to write as one: one that is mostly dead, or enough small ones."""
    for at, entry in enumerate(entries):
        if 2 * entry.dead.chunks > entry.size.chunks:
            return range(at, at + 1)
    sizes = [entry.live.chunks for entry in entries]
    for limit in sorted(set(sizes)):
        for run in _runs(sizes, limit):
            total, largest = sum(sizes[run.start : run.stop]), max(sizes[run.start : run.stop])
            if len(run) >= MERGE and 2 * largest <= total <= LARGEST:
                return run
    if sum(2 * size <= LARGEST for size in sizes) <= MOST:
        return None
    pairs = [(sizes[at] + sizes[at + 1], at) for at in range(len(sizes) - 1)]
    total, at = min(pairs)
    return range(at, at + 2) if total <= LARGEST else None


def _runs(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Yield stretches of adjacent sizes up to a limit; of a stretch beyond a full segment, the last part."""
    for small, group in groupby(range(len(sizes)), key=lambda at: sizes[at] <= limit):
        places = list(group)
        while small and sum(sizes[at] for at in places) > LARGEST:
            places.pop(0)
        if small and places:
            yield range(places[0], places[-1] + 1)
