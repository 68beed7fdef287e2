"""The compiled inner loops of retrieval: postings of BM25 and their scores, the trigram index, and exact search by
embeddings. numba compiles them on the first call and keeps them beside this file; they run without the GIL.

A posting is a chunk and a code, which stands for a pair (occurrences of the term, length of the chunk). There are few
pairs, so the part of BM25 that depends on them is a table, made anew for each generation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

from harness1.errors import InstallationWarning

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Words = NDArray[np.uint32]
Codes = NDArray[Any]
Flags = NDArray[np.bool_]

BLOCK = 1 << 15
"""Chunks scored at a time; their sums (128 KiB) stay in the second-level cache."""
TEETH = 64
"""Chunks in a comb, a set of evenly spaced chunks of a block: one comparison with the border covers them all."""
BUCKET_BITS = 16
"""log2 of the number of buckets. Trigrams of a bucket share a list; few of the 30,000 trigrams of English do."""
SPREAD = 0x9E3779B1
"""The golden ratio times 2 ** 32, odd, moves all bits of a trigram into the highest (Knuth, TAOCP 3, 6.4)."""
HALF = np.int32(-0x7000_2000)
"""Sign, exponent and fraction of a half moved to the top of 32 bits (sign extended, shifted by 13)."""
SCALE = np.float32(2.0**112)
"""Factor of the smaller exponent bias of a half; subnormal halves come out right, too."""

F = TypeVar("F", bound=Callable[..., Any])


def compile_kernel(**options: Any) -> Callable[[F], F]:
    """Return a decorator that compiles a function for use without the GIL; `options` are numba's."""

    def compile_function(function: F) -> F:
        try:
            made: F = njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # numba found neither this folder nor one in the user's home that can be written
            _warn()
            made = njit(nogil=True, **options)(function)
        return made

    return compile_function


@cache
def _warn() -> None:
    line = "the search is compiled anew each time, which takes seconds: no folder can be written to keep it in"
    warnings.warn(line, InstallationWarning, stacklevel=3)


@compile_kernel()
def count_terms(numbers: Ints, sizes: Ints, last: Ints, slots: Ints) -> tuple[Ints, Ints, Ints]:
    """Count each term in each chunk. `numbers` has all terms, chunk after chunk; `sizes` how many each chunk has;
    `last` (filled with -1) and `slots` are scratch, one place for each term. Returns term and count of every distinct
    term, chunk after chunk, and the distinct terms of each chunk."""
    terms = np.empty(len(numbers), np.int32)
    counts = np.empty(len(numbers), np.int32)
    distinct = np.zeros(len(sizes), np.int32)
    at, made = 0, 0
    for chunk in range(len(sizes)):
        first = made
        for _ in range(sizes[chunk]):
            term = numbers[at]
            at += 1
            if last[term] == chunk:
                counts[slots[term]] += 1
            else:
                last[term] = chunk
                slots[term] = made
                terms[made] = term
                counts[made] = 1
                made += 1
        distinct[chunk] = made - first
    return terms[:made], counts[:made], distinct


@compile_kernel()
def invert(terms: Ints, codes: Words, distinct: Ints, first: int, vocabulary: int) -> tuple[Longs, Words, Words]:
    """Turn terms by chunk into postings by term: starts [vocabulary + 1], chunks from `first` on, codes."""
    starts = np.zeros(vocabulary + 1, np.int64)
    for term in terms:
        starts[term + 1] += 1
    for term in range(vocabulary):
        starts[term + 1] += starts[term]
    ends = starts[:-1].copy()
    chunks = np.empty(len(terms), np.uint32)
    placed = np.empty(len(terms), np.uint32)
    at = 0
    for chunk in range(len(distinct)):
        for _ in range(distinct[chunk]):
            place = ends[terms[at]]
            ends[terms[at]] += 1
            chunks[place] = first + chunk
            placed[place] = codes[at]
            at += 1
    return starts, chunks, placed


@compile_kernel()
def append_run(ends: Longs, out: NDArray[Any], starts: Longs, values: Words) -> None:
    """Copy one run of postings behind those of earlier runs; moves `ends`, where the postings of each term continue."""
    for term in range(len(starts) - 1):
        end = ends[term]
        for at in range(starts[term], starts[term + 1]):
            out[end] = values[at]
            end += 1
        ends[term] = end


@compile_kernel()
def best(
    chunks: Words,
    codes: Codes,
    spans: Longs,
    weights: Floats,
    table: Floats,
    size: int,
    gone: Words,
    k: int,
    margin: Any,
) -> tuple[Words, Floats]:
    """Return the chunks, of `size`, whose score is above 0 and above that of the k-th best less `margin`, with their
    scores, unordered. `spans` [terms, 2] says where the postings of each term begin and end; a weight times a share
    from the table is a score; `gone` are sorted chunks to leave out."""
    sums = np.zeros(BLOCK, np.float32)
    bits = sums.view(np.int32)
    peak_bits = np.zeros(BLOCK // TEETH, np.int32)
    peaks = peak_bits.view(np.float32)
    found = np.empty(BLOCK + 2 * k, np.uint32)
    scores = np.empty(len(found), np.float32)
    cursors = spans[:, 0].copy()
    count, border, at = 0, 0.0, 0
    for low in range(0, size, BLOCK):
        high = min(low + BLOCK, size)
        for term in range(len(weights)):
            cursors[term] = _add(sums, chunks, codes, cursors[term], spans[term, 1], weights[term], table, low, high)
        while at < len(gone) and gone[at] < high:
            sums[gone[at] - low] = 0.0
            at += 1
        _peaks(bits, peak_bits)
        if low == 0 and k < len(peaks):
            # In each of k combs a chunk reaches this, so the k-th best of all is no worse.
            border = max(border, float(np.partition(peaks, len(peaks) - k)[len(peaks) - k]) - margin)
        if count + BLOCK > len(found):
            count, border = _tighten(found, scores, count, k, margin, border)
            if count > 2 * k:
                found = np.concatenate((found, np.empty_like(found)))
                scores = np.concatenate((scores, np.empty_like(scores)))
        count = _collect(sums, peaks, low, border, found, scores, count)
        sums[:] = 0.0
    count, border = _tighten(found, scores, count, k, margin, border)
    return found[:count].copy(), scores[:count].copy()


@compile_kernel()
def _peaks(sums: Ints, peaks: Ints) -> None:
    """Write the highest sum of every comb, `len(peaks)` apart. Not negative, bits compare as integers, in vectors."""
    peaks[:] = 0
    for first in range(0, len(sums), len(peaks)):
        row = sums[first : first + len(peaks)]
        for comb in range(len(peaks)):
            if row[comb] > peaks[comb]:
                peaks[comb] = row[comb]


@compile_kernel()
def _add(
    sums: Floats, chunks: Words, codes: Codes, cursor: int, end: int, weight: float, table: Floats, low: int, high: int
) -> int:
    """Add the postings of one term to the sums of one block, and return where the postings continue."""
    if cursor == end or chunks[cursor] >= high:
        return cursor
    stop = cursor + int(np.searchsorted(chunks[cursor:end], np.uint32(high)))
    base = np.uint32(low)
    for at in range(cursor, stop):
        sums[chunks[at] - base] += weight * table[codes[at]]
    return stop


@compile_kernel()
def _collect(sums: Floats, peaks: Floats, low: int, border: float, found: Words, scores: Floats, count: int) -> int:
    """Append the chunks of a block above the border. This compiles better as a separate function."""
    for comb in range(len(peaks)):
        if peaks[comb] > border:
            for place in range(comb, len(sums), len(peaks)):
                if sums[place] > border:
                    found[count], scores[count] = low + place, sums[place]
                    count += 1
    return count


@compile_kernel()
def _tighten(found: Words, scores: Floats, count: int, k: int, margin: float, border: float) -> tuple[int, float]:
    """Keep the chunks above the border, the k-th best score minus the margin; return their number and the border."""
    if count <= k:
        return count, border
    border = max(border, float(np.partition(scores[:count], count - k)[count - k]) - margin)
    kept = 0
    for at in range(count):
        if scores[at] > border:
            found[kept], scores[kept] = found[at], scores[at]
            kept += 1
    return kept, border


@compile_kernel()
def bucket_of(trigram: Any) -> Any:
    """Return the bucket of a trigram, which is three bytes in one number."""
    return np.uint32(np.uint32(trigram) * np.uint32(SPREAD)) >> np.uint32(32 - BUCKET_BITS)


@compile_kernel()
def write_lists(
    text: Bytes, ends: Longs, blocks: Ints, first: int, stop: int, last: Ints, places: Longs, dense: Flags, lists: Bytes
) -> None:
    """Append the blocks from `first` to before `stop` to the lists of their buckets; if `lists` is empty, only count
    bytes. `ends` [chunks + 1] and `blocks` [blocks + 1] say where each begins and the last one ends, in bytes and in
    chunks. Updated in place, for each bucket: `last`, its latest block, -1 before any, and `places`, where its list
    continues, or a dense one begins. A list holds the gaps between its blocks, minus one, in 7-bit groups, the lowest
    first; a set high bit means that another follows. A dense list has one bit for each block, the lowest first."""
    seen = np.full(1 << BUCKET_BITS, -1, np.int32)
    room = 1
    for block in range(first, stop):
        room = max(room, ends[blocks[block + 1]] - ends[blocks[block]])
    folded, buckets = np.empty(room, np.uint8), np.empty(room, np.uint16)
    for block in range(first, stop):
        for at in range(_distinct(text, ends, blocks, block, seen, folded, buckets)):
            bucket = buckets[at]
            place = places[bucket]
            if dense[bucket]:
                lists[place + (block >> 3)] |= np.uint8(1 << (block & 7))
            else:
                gap = block - last[bucket] - 1
                while gap >= 1 << 7:
                    if len(lists):
                        lists[place] = np.uint8(gap & 127 | 128)
                    gap >>= 7
                    place += 1
                if len(lists):
                    lists[place] = np.uint8(gap)
                places[bucket] = place + 1
            last[bucket] = block


@compile_kernel()
def read_list(encoded: Bytes, bits: Bytes) -> bool:
    """Set the bits of the blocks of a list that is not dense; return False if it leads beyond them."""
    block, gap, shift = -1, 0, 0
    for byte in encoded:
        gap |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            block += gap + 1
            if not 0 <= block >> 3 < len(bits):
                return False
            bits[block >> 3] |= np.uint8(1 << (block & 7))
            gap, shift = 0, 0
    return True


@compile_kernel()
def _distinct(
    text: Bytes, ends: Longs, blocks: Ints, block: int, seen: Ints, folded: Bytes, buckets: NDArray[np.uint16]
) -> Any:
    """Write the buckets of a block's trigrams, each once, and return their number. No trigram spans two chunks. `seen`
    has the latest block of each bucket, -1 before any, updated in place; `folded` is scratch."""
    count = 0
    for chunk in range(blocks[block], blocks[block + 1]):
        length = _fold(text, ends[chunk], ends[chunk + 1], folded)
        for at in range(length - 2):
            high, middle, low = np.uint32(folded[at]), np.uint32(folded[at + 1]), np.uint32(folded[at + 2])
            bucket = bucket_of(high << np.uint32(16) | middle << np.uint32(8) | low)
            # No branch, because the processor cannot predict whether a trigram is new to its block.
            buckets[count] = bucket
            count += seen[bucket] != block
            seen[bucket] = block
    return count


@compile_kernel()
def _fold(text: Bytes, start: int, stop: int, folded: Bytes) -> Any:
    """Copy UTF-8 folded as in `harness1.retrieval.pattern.fold`, and return the number of bytes written."""
    length, at = 0, start
    while at < stop:
        byte = text[at]
        at += 1
        if byte >= 0xC5:
            if byte == 0xC5 and at < stop and text[at] == 0xBF:
                byte = np.uint8(ord("s"))
                at += 1
            elif byte == 0xE2 and at + 1 < stop and text[at] == 0x84 and text[at + 1] == 0xAA:
                byte = np.uint8(ord("k"))
                at += 2
        upper = np.uint8(byte - np.uint8(ord("A"))) < 26
        folded[length] = byte + np.uint8(32) * np.uint8(upper)
        length += 1
    return length


@compile_kernel()
def widen(halves: NDArray[np.int16], out: Floats) -> None:
    """Convert the bits of half precision numbers, [n, d], to single precision, four times as fast as numpy."""
    for row in range(halves.shape[0]):
        for column in range(halves.shape[1]):
            bits = (np.int32(halves[row, column]) << np.int32(13)) & HALF
            out[row, column] = np.int32(bits).view(np.float32) * SCALE


@compile_kernel(fastmath={"reassoc", "contract"})
def dots(halves: NDArray[np.int16], query: Floats, out: Floats) -> None:
    """Write a vector's products with half precision rows, [n, d] as bits; scaled, or they would be too small."""
    scaled = query * SCALE
    for row in range(halves.shape[0]):
        total = np.float32(0.0)
        for column in range(halves.shape[1]):
            bits = (np.int32(halves[row, column]) << np.int32(13)) & HALF
            total += np.int32(bits).view(np.float32) * scaled[column]
        out[row] = total
