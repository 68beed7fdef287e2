"""The compiled inner loops of the trigram index: reading texts, writing lists of blocks, reading them back.

Compiled by numba on the first call and cached beside this file; they run without the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

BUCKET_BITS = 16
"""log2 of the number of buckets. Trigrams that share a bucket share a list; few of the 30,000 trigrams of English
do."""
SPREAD = 0x9E3779B1
"""The golden ratio times 2 ** 32, odd: multiplying by it moves all bits of a trigram into the highest bits (Knuth, The
Art of Computer Programming 3, 6.4)."""


@njit(cache=True, nogil=True)
def bucket_of(trigram: Any) -> Any:
    """Return the bucket of a trigram, which is three bytes in one number."""
    return np.uint32(np.uint32(trigram) * np.uint32(SPREAD)) >> np.uint32(32 - BUCKET_BITS)


@njit(cache=True, nogil=True)
def list_sizes(
    text: NDArray[np.uint8],
    ends: NDArray[np.int64],
    blocks: NDArray[np.int32],
    first: int,
    stop: int,
    last: NDArray[np.int32],
    sizes: NDArray[np.int64],
) -> None:
    """Add up the bytes that the blocks from `first` to before `stop` take in the lists of their buckets.

    Args:
        ends: [chunks + 1] where each chunk begins and the last one ends, in bytes.
        blocks: [blocks + 1] the same for blocks, in chunks.
        last: for each bucket its latest block, -1 before any; updated in place.
        sizes: for each bucket, the bytes of its list; updated in place.
    """
    seen = np.full(1 << BUCKET_BITS, -1, np.int32)
    room = _longest(ends, blocks, first, stop)
    folded, buckets = np.empty(room, np.uint8), np.empty(room, np.uint16)
    for block in range(first, stop):
        for at in range(_distinct(text, ends, blocks, block, seen, folded, buckets)):
            bucket = buckets[at]
            gap = block - last[bucket] - 1
            sizes[bucket] += 1 + (gap >= 1 << 7) + (gap >= 1 << 14) + (gap >= 1 << 21) + (gap >= 1 << 28)
            last[bucket] = block


@njit(cache=True, nogil=True)
def write_lists(
    text: NDArray[np.uint8],
    ends: NDArray[np.int64],
    blocks: NDArray[np.int32],
    first: int,
    stop: int,
    last: NDArray[np.int32],
    places: NDArray[np.int64],
    dense: NDArray[np.bool_],
    lists: NDArray[np.uint8],
) -> None:
    """Append the blocks from `first` to before `stop` to the lists of their buckets; arguments as in `list_sizes`.

    A list holds the gaps between its blocks, minus one, in 7-bit groups, the lowest first; a set high bit means that
    another group follows. A dense list has one bit for each block, the lowest first.

    Args:
        places: for each bucket, where its list continues, updated in place; for a dense list, where it begins.
    """
    seen = np.full(1 << BUCKET_BITS, -1, np.int32)
    room = _longest(ends, blocks, first, stop)
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
                    lists[place] = np.uint8(gap & 127 | 128)
                    gap >>= 7
                    place += 1
                lists[place] = np.uint8(gap)
                places[bucket] = place + 1
            last[bucket] = block


@njit(cache=True, nogil=True)
def read_list(encoded: NDArray[np.uint8], bits: NDArray[np.uint8]) -> bool:
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


@njit(cache=True, nogil=True)
def _longest(ends: NDArray[np.int64], blocks: NDArray[np.int32], first: int, stop: int) -> Any:
    """Return the number of bytes in the largest block, plus one."""
    longest = 0
    for block in range(first, stop):
        longest = max(longest, ends[blocks[block + 1]] - ends[blocks[block]])
    return longest + 1


@njit(cache=True, nogil=True)
def _distinct(
    text: NDArray[np.uint8],
    ends: NDArray[np.int64],
    blocks: NDArray[np.int32],
    block: int,
    seen: NDArray[np.int32],
    folded: NDArray[np.uint8],
    buckets: NDArray[np.uint16],
) -> Any:
    """Write the buckets of a block's trigrams, each once, and return their number. No trigram spans two chunks.

    Args:
        seen: for each bucket the latest block that had it, -1 before any; updated in place.
        folded: scratch.
    """
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


@njit(cache=True, nogil=True)
def _fold(text: NDArray[np.uint8], start: int, stop: int, folded: NDArray[np.uint8]) -> Any:
    """Copy UTF-8 folded as in `harness1.retrieval.grep.pattern.fold`, and return the number of bytes written."""
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
