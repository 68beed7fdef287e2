"""Searches all texts for regular expressions: an index of trigrams finds the chunks that may match, RE2 decides.

Chunks that begin in the same KiB of the text make up a block. For every trigram of folded bytes, hashed into a bucket,
the index lists the blocks that have it (Cox, "Regular Expression Matching with a Trigram Index", 2012; Zobel and
Moffat, "Inverted Files for Text Search Engines", ACM Computing Surveys 2006, on the coding of lists):

    trigrams.blocks.npy  [blocks + 1] where each block begins and the last one ends, in chunks
    trigrams.starts.npy  [buckets + 1] where the list of each bucket begins and the last one ends, in bytes
    trigrams.lists.npy   the lists: gaps of 1 to 5 bytes, or one bit for each block where that takes no more

RE2 takes linear time, which can still be long. A pattern that needs more work than `MOST_WORK` is refused; the work is
estimated, not timed, so that a pattern is refused on every machine or on none."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import re2
from numpy.typing import NDArray

from harness1.retrieval.files import DamagedFile, Files, Strings
from harness1.retrieval.pattern import ANYTHING, All, Analysis, Query, analyse
from harness1.retrieval.protocol import BadPattern, RetrievalFault

BLOCK_BYTES = 1024
"""The size of a block. Smaller ones select better and take more space."""
STRETCH = 1 << 14
"""Blocks indexed between two points at which a build can be interrupted."""
FEW = 4
"""Bytes, of 8 blocks each, with candidates. If no more are left, reading them costs no more than further lists."""
LONGEST_PATTERN = 1000
MEMORY = 2 << 20
"""Bytes that a compiled pattern may take. If matching needs more, RE2 gets slower instead."""
MOST_WORK = 8 << 20
"""The most work, in units: a million take about 5 ms, and a byte read by a costly automaton is one."""
CHUNK_WORK = 700
"""Units for moving to a chunk."""
PLAIN_SPEED = 3
"""Bytes that an automaton with few states reads for one unit."""
LIST_SPEED = 32
"""Bytes of a trigram's list that are read in the time of one byte of text."""
FREE_CHOICES = 10
"""RE2 caches the states that an automaton has visited. Up to 2 ** 10 are cheap. Each further choice doubles their
number and makes them bigger, so that they are evicted sooner. In measurements this costs up to four times the work,
until every byte makes a new state with up to all instructions of the program."""
HELD_CHOICES = 4
"""Choices after a literal that cost as much as reading a byte, because few places in a text have the literal."""
TURN = 0.002
"""Seconds of work between two turns of the event loop."""
BATCH = 256
"""Ranges of candidates that are searched together."""
NEEDLE_SPEED = 4
"""Bytes searched for a literal, many chunks at once, in the time of matching one byte."""
SEPARATOR = b"\xff"
"""Separates chunks that are searched together. UTF-8 never contains it, so no match spans two chunks."""
NO_CHUNK = -1

Matches = list[tuple[int, int]]


def write_trigrams(folder: Path, contents: memoryview | bytes, ends: NDArray[np.int64]) -> None:
    """Index a segment's chunks; `ends`, [chunks + 1], says where each begins and the last ends, in bytes."""
    from harness1.retrieval import kernels

    text = np.frombuffer(contents, np.uint8)
    kibs = ends[:-1] // BLOCK_BYTES
    blocks = np.append(np.flatnonzero(np.diff(kibs, prepend=-1)), len(kibs)).astype(np.int32)
    count, buckets = len(blocks) - 1, 1 << kernels.BUCKET_BITS
    stretches = [(first, min(first + STRETCH, count)) for first in range(0, count, STRETCH)]
    dense, lists, places = np.zeros(buckets, np.bool_), np.empty(0, np.uint8), np.zeros(buckets, np.int64)

    def write() -> None:
        last = np.full(buckets, -1, np.int32)
        for first, stop in stretches:
            kernels.write_lists(text, ends, blocks, first, stop, last, places, dense, lists)

    write()  # into nothing, which counts the bytes of each list
    dense = places >= _bitmap_bytes(count)
    starts = np.concatenate(([0], np.cumsum(np.where(dense, _bitmap_bytes(count), places))))
    lists, places = np.zeros(starts[-1], np.uint8), starts[:-1].copy()
    write()
    for name, values in (("blocks", blocks), ("starts", starts), ("lists", lists)):
        np.save(folder / f"trigrams.{name}.npy", values)


def _bitmap_bytes(blocks: int) -> int:
    return -(-blocks // 8)


class Trigrams:
    """The memory-mapped index of one segment."""

    def __init__(self, files: Files) -> None:
        self._blocks: NDArray[np.int32] = files.load("trigrams.blocks.npy")
        self._starts: NDArray[np.int64] = files.load("trigrams.starts.npy")
        self._lists = files.file("trigrams.lists.npy")

    def candidates(self, query: Query) -> NDArray[np.int64]:
        """Return all chunks that may satisfy a query, as ranges [ranges, 2] from start to before stop, in order."""
        found = np.arange(len(self._blocks) - 1)
        if query != ANYTHING:
            bits = self._blocks_of(query)
            occupied = np.flatnonzero(bits)
            rows, columns = np.nonzero(np.unpackbits(bits[occupied, None], axis=1, bitorder="little"))
            found = occupied[rows] * 8 + columns
        return np.stack((self._blocks[found], self._blocks[found + 1]), axis=1).astype(np.int64)

    def cost(self, query: Query) -> int:
        """Return the largest number of bytes to read for a query: the sum over its lists."""
        if isinstance(query, int):
            start, stop = self._range(query)
            return stop - start
        return sum(map(self.cost, query.of))

    def _blocks_of(self, query: Query) -> NDArray[np.uint8]:
        """Return one bit for each block that may satisfy the query."""
        if isinstance(query, int):
            return self._list(query)
        if not isinstance(query, All):
            either: NDArray[np.uint8] = np.bitwise_or.reduce([self._blocks_of(each) for each in query.of])
            return either
        shortest, *others = sorted(query.of, key=self.cost)
        bits = self._blocks_of(shortest)
        for other in others:
            if np.count_nonzero(bits) <= FEW:
                break
            bits = bits & self._blocks_of(other)
        return bits

    def _list(self, trigram: int) -> NDArray[np.uint8]:
        from harness1.retrieval import kernels

        start, stop = self._range(trigram)
        encoded: NDArray[np.uint8] = self._lists.array[start:stop]
        size = _bitmap_bytes(len(self._blocks) - 1)
        if len(encoded) == size:
            return encoded
        bits = np.zeros(size, np.uint8)
        if not kernels.read_list(encoded, bits):
            raise DamagedFile("trigrams.lists.npy is damaged: it names blocks that do not exist")
        return bits

    def _range(self, trigram: int) -> tuple[int, int]:
        from harness1.retrieval import kernels

        bucket = kernels.bucket_of(trigram)
        return int(self._starts[bucket]), int(self._starts[bucket + 1])


class GrepSegment(Protocol):
    """The parts of a segment that grep reads; `dead` are its deleted chunks, sorted."""

    trigrams: Trigrams
    contents: Strings
    dead: NDArray[np.uint32]


def grep_segments(
    segments: Sequence[GrepSegment], pattern: str, limit: int, deadline: float
) -> Generator[None, None, Matches | BadPattern | RetrievalFault]:
    """Find the first `limit` chunks, in the order of the segments, that hold a match of an RE2 pattern. The generator
    yields every 2 ms of work, and returns (segment, position in it) for each; nothing after `deadline` seconds."""
    end = time.monotonic() + deadline
    compiled = compile_pattern(pattern)
    if isinstance(compiled, BadPattern):
        return compiled
    analysis = analyse(pattern)
    # The largest cost of reading a byte: at worst, all instructions of the program are followed at every byte.
    free: int = 4 ** max(0, min(analysis.free, 64) - FREE_CHOICES)
    steps = _steps(segments, analysis, min(compiled.programsize, free + analysis.held // HELD_CHOICES))
    found: Matches = []
    work, read, turn = 0, 0, time.monotonic()
    for cost, number, position in steps if limit > 0 else ():
        work += cost
        if work > MOST_WORK:
            broad = f"too broad: gave up after {read} chunks with {len(found)} matches"
            return BadPattern(f"{broad}; add a word that every match has, or shorten what may repeat")
        now = time.monotonic()
        if now > end:
            return RetrievalFault("deadline")
        if now > turn + TURN:
            yield
            turn = time.monotonic()
        if position == NO_CHUNK:
            continue
        read += 1
        if analysis.needle == pattern or compiled.search(segments[number].contents.view(position)):
            found.append((number, position))
            if len(found) >= limit:
                break
    return found


def compile_pattern(pattern: str, longest: int | None = LONGEST_PATTERN) -> re2._Regexp | BadPattern:
    """Compile a pattern of at most `longest` characters, or say in a few words what is wrong with it."""
    if longest is not None and len(pattern) > longest:
        return BadPattern(f"longer than {longest} characters")
    options = re2.Options()
    options.max_mem = MEMORY
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else "invalid"
        return BadPattern(reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason))
    except UnicodeEncodeError:
        return BadPattern("not valid Unicode")


def _steps(segments: Sequence[GrepSegment], analysis: Analysis, weight: int) -> Iterator[tuple[int, int, int]]:
    """Yield the work in order: its cost, the segment, and the chunk to match, or `NO_CHUNK` for other work."""
    needle = compile_pattern(analysis.needle, longest=None) if analysis.needle else None
    for number, segment in enumerate(segments):
        ends = segment.contents.ends
        yield segment.trigrams.cost(analysis.query) // LIST_SPEED, number, NO_CHUNK
        for chunks in _batches(segment, analysis.query):
            if needle is None or isinstance(needle, BadPattern):
                survivors = iter(chunks.tolist())
            else:
                size = int(np.sum(ends[chunks + 1] - ends[chunks]))
                yield size // NEEDLE_SPEED, number, NO_CHUNK
                survivors = _find_needle(needle, segment.contents, chunks)
            for chunk in survivors:
                size = int(ends[chunk + 1] - ends[chunk])
                yield CHUNK_WORK + (size * weight if weight > 1 else size // PLAIN_SPEED), number, chunk


def _batches(segment: GrepSegment, query: Query) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of the living chunks that may satisfy a query, in order."""
    all_ranges = segment.trigrams.candidates(query)
    for first in range(0, len(all_ranges), BATCH):
        ranges = all_ranges[first : first + BATCH]
        sizes = ranges[:, 1] - ranges[:, 0]
        before = np.cumsum(sizes) - sizes
        positions = np.repeat(ranges[:, 0] - before, sizes) + np.arange(np.sum(sizes))
        yield positions[np.isin(positions, segment.dead, invert=True)] if len(segment.dead) else positions


def _find_needle(needle: re2._Regexp, contents: Strings, chunks: NDArray[np.int64]) -> Iterator[int]:
    """Yield the chunks that match a literal, found in one search through all of them."""
    spans = list(zip(contents.ends[chunks].tolist(), contents.ends[chunks + 1].tolist(), strict=True))
    text = SEPARATOR.join([contents.bytes[start:stop] for start, stop in spans])
    begins = list(accumulate((stop - start + len(SEPARATOR) for start, stop in spans), initial=0))
    match = needle.search(text)
    while match:
        at = bisect_right(begins, match.start()) - 1
        yield int(chunks[at])
        match = needle.search(text, begins[at + 1])
