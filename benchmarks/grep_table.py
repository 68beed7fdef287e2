"""The grep tables of `retrieval.py`: rare literals beside plain RE2 scans, and patterns designed to be slow.

The scans get the same bytes, already in memory. One scans a whole segment at once, which is the fastest way with RE2
alone, and finds the chunk of each match afterwards; the other matches chunk by chunk.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import re2

from harness1.retrieval.grep.search import grep_segments
from harness1.retrieval.index.index import EmbeddedIndex, open_index
from harness1.retrieval.protocol import BadPattern, RetrievalFault

LITERALS, RARE, REPEATS, ALL, FIRST = 8, 10, 9, 10**9, 5
HOSTILE = [
    "(a+)+$", "(a|a)*b", r"([a-z]+)*\d", r"(\w+\s?)*$^", "(.*)*x", r"(x+x+)+y\x01",
    "(a?){500}a{500}", r"(\w?){500}\w{500}", "((a{100}){10}){1}", r"(.*){200}\x01", "(a|b)*a(a|b){20}",
    r"[a-m][a-z ,]{20}\x01", r"[a-m].{12}\x01", r"[a-m].{40}\x01", "." * 900 + r"\x01", "a" + "." * 900 + r"\x01",
    r"the.{1,300}\x01", r"(the|and).{400}\x01", r"in.{0,50}on.{0,50}\x01", r"(\w{1,20} ){5}\x01",
    r"\pL{40}\x01", r"(\pL{1,20}){1,9}\x01", "(" * 200 + "a+" + ")+" * 200, "|".join(f"w{at}" for at in range(10_000)),
    "|".join(f"{at}.{at}" for at in range(120)), r"\d{9}\d*\x01",
]  # fmt: skip
"""Nested quantifiers, thousands of alternatives, huge repeats, gaps without a literal: alone, or before a byte that no
text has."""

Row = dict[str, Any]
Found = list[tuple[int, int]]


def rare_table(index: EmbeddedIndex) -> list[Row]:
    """Return a row for each literal, with and without case: our milliseconds, and the scans' as multiples of ours."""
    literals = list(_rare_literals(index))
    return [_rare(index, prefix + literal) for prefix in ("", "(?i)") for literal in literals]


def hostile_table(index: EmbeddedIndex) -> list[Row]:
    """Return a row for each pattern, compiled anew: milliseconds, and the result."""
    rows = []
    for pattern in HOSTILE:
        times = []
        for _ in range(3):
            re2.purge()
            milliseconds, found = _timed(_ours, index, pattern, FIRST)
            times.append(milliseconds)
        outcome = found.reason if isinstance(found, BadPattern) else f"{len(found)} matches"
        shown = pattern if len(pattern) <= 40 else f"{pattern[:30]}... ({len(pattern)} characters)"
        rows.append({"pattern": shown, "ms": max(times), "outcome": outcome})
    return rows


def open_built(folder: Path) -> EmbeddedIndex:
    """Open the index that the BM25 table built in a folder, or build it there."""
    return open_index(folder / "ours")


def _rare_literals(index: EmbeddedIndex) -> Iterator[str]:
    """Yield long words from randomly drawn chunks that occur in few chunks."""
    rng, given = random.Random(len(index)), 0
    for position in iter(lambda: rng.randrange(len(index)), None):
        words = [word for word in index.chunk(position).text.split() if word.isascii() and word.isalpha()]
        longest = max(words, key=len, default="")
        if len(longest) >= 8 and 0 < len(_ours(index, longest, RARE + 1)) <= RARE:
            yield longest
            given += 1
        if given == LITERALS:
            return


def _rare(index: EmbeddedIndex, pattern: str) -> Row:
    """Measure a pattern: medians of interleaved runs, so that other work on the machine affects all equally."""
    whole, single = _compiled(pattern), _compiled(pattern)
    times: dict[str, list[float]] = {"all": [], "first": [], "scan": []}
    found: Found = []
    for repeat in range(REPEATS):
        milliseconds, found = _timed(_ours, index, pattern, ALL)
        times["all"].append(milliseconds)
        times["first"].append(_timed(_ours, index, pattern, FIRST)[0])
        if repeat % 3 == 0:
            milliseconds, scanned = _timed(_scan, index, whole)
            assert found == scanned, pattern
            times["scan"].append(milliseconds)
    ours, first, scan = (statistics.median(each) for each in times.values())
    chunkwise = _timed(_chunk_by_chunk, index, single)[0]
    return {
        "pattern": pattern,
        "hits": len(found),
        "ms": ours,
        "first_5_ms": first,
        "scan_ms": scan,
        "scan_ratio": scan / ours,
        "chunk_by_chunk_ms": chunkwise,
        "chunk_by_chunk_ratio": chunkwise / ours,
    }


def _ours(index: EmbeddedIndex, pattern: str, limit: int) -> Any:
    steps = grep_segments(index.segments, pattern, limit, deadline=60.0)
    result = None
    while result is None:
        try:
            next(steps)
        except StopIteration as stop:
            result = stop.value
    assert not isinstance(result, RetrievalFault), result
    return result


def _scan(index: EmbeddedIndex, pattern: Any) -> Found:
    """Scan the bytes of each segment in one pass. No match crosses the border between adjacent chunks:
    the literals are words, and chunks are texts."""
    found: Found = []
    for number, segment in enumerate(index.segments):
        starts = [match.start() for match in pattern.finditer(segment.contents.file.bytes)]
        positions = np.unique(np.searchsorted(segment.contents.ends, starts, side="right") - 1)
        found += [(number, position) for position in positions.tolist()]
    return found


def _chunk_by_chunk(index: EmbeddedIndex, pattern: Any) -> Found:
    return [
        (number, position)
        for number, segment in enumerate(index.segments)
        for position in range(len(segment.contents))
        if pattern.search(segment.contents.view(position))
    ]


def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors, options.never_capture = False, True
    return re2.compile(pattern, options)


def _timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work(*arguments)
    return (time.perf_counter() - begin) * 1000, result
