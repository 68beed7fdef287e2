"""An index of the trigrams of a segment, which finds the chunks that may match a pattern.

Chunks that begin in the same KiB of the text make up a block. For every trigram of folded bytes, hashed into a
bucket, the index lists the blocks that have it (Cox, "Regular Expression Matching with a Trigram Index", 2012; Zobel
and Moffat, "Inverted Files for Text Search Engines", ACM Computing Surveys 2006, on the coding of lists):

    trigrams.blocks.npy  [blocks + 1] where each block begins and the last one ends, in chunks
    trigrams.starts.npy  [buckets + 1] where the list of each bucket begins and the last one ends, in bytes
    trigrams.lists.npy   the lists: gaps of 1 to 5 bytes, or one bit for each block where that takes no more

A list whose bytes number the blocks divided by 8, rounded up, is a list of bits.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness1.retrieval.checked import DamagedFile, Files
from harness1.retrieval.grep.pattern import ANYTHING, All, Query

BLOCK_BYTES = 1024
"""The size of a block. Smaller ones select better and take more space."""
STRETCH = 1 << 14
"""Blocks indexed between two points at which a build can be interrupted."""
FEW = 4
"""Bytes, of 8 blocks each, with candidates. If no more are left, reading them costs no more than further lists."""


def write_trigrams(folder: Path, contents: memoryview | bytes, ends: NDArray[np.int64]) -> None:
    """Index the chunks of a segment. The index is built in memory, in about a third of the size of the text.

    Args:
        contents: the UTF-8 of all chunks, one after the other.
        ends: [chunks + 1] where each chunk begins and the last one ends, in bytes.
    """
    from harness1.retrieval.grep import kernels

    text = np.frombuffer(contents, np.uint8)
    blocks = _cut(ends)
    count, buckets = len(blocks) - 1, 1 << kernels.BUCKET_BITS
    stretches = [(first, min(first + STRETCH, count)) for first in range(0, count, STRETCH)]
    last, sizes = np.full(buckets, -1, np.int32), np.zeros(buckets, np.int64)
    for first, stop in stretches:
        kernels.list_sizes(text, ends, blocks, first, stop, last, sizes)
    dense = sizes >= _bitmap_bytes(count)
    starts = np.concatenate(([0], np.cumsum(np.where(dense, _bitmap_bytes(count), sizes))))
    lists, places = np.zeros(starts[-1], np.uint8), starts[:-1].copy()
    last.fill(-1)
    for first, stop in stretches:
        kernels.write_lists(text, ends, blocks, first, stop, last, places, dense, lists)
    for name, values in (("blocks", blocks), ("starts", starts), ("lists", lists)):
        np.save(folder / f"trigrams.{name}.npy", values)


class Trigrams:
    """The memory-mapped index of one segment."""

    def __init__(self, files: Files) -> None:
        self._arrays = files.array("trigrams.blocks.npy"), files.array("trigrams.starts.npy")
        self._lists = files.array("trigrams.lists.npy")

    @cached_property
    def _blocks(self) -> NDArray[np.int32]:
        return self._arrays[0].whole()

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return self._arrays[1].whole()

    def candidates(self, query: Query) -> NDArray[np.int64] | None:
        """Return the chunks that may satisfy a query, as ranges [ranges, 2] from start to before stop, in order.

        None stands for all chunks. No chunk that satisfies the query is left out.
        """
        if query == ANYTHING:
            return None
        bits = self._blocks_of(query)
        occupied = np.flatnonzero(bits)
        rows, columns = np.nonzero(np.unpackbits(bits[occupied, None], axis=1, bitorder="little"))
        found = occupied[rows] * 8 + columns
        return np.stack((self._blocks[found], self._blocks[found + 1]), axis=1).astype(np.int64)

    def _blocks_of(self, query: Query) -> NDArray[np.uint8]:
        """Return one bit for each block that may satisfy the query."""
        if isinstance(query, int):
            return self._list(query)
        if isinstance(query, All):
            return self._common(query)
        bits: NDArray[np.uint8] = np.bitwise_or.reduce([self._blocks_of(each) for each in query.of])
        return bits

    def _common(self, query: All) -> NDArray[np.uint8]:
        """Intersect the lists, shortest first, until few candidates are left."""
        shortest, *others = sorted(query.of, key=self.cost)
        bits = self._blocks_of(shortest)
        for other in others:
            if np.count_nonzero(bits) <= FEW:
                break
            bits = bits & self._blocks_of(other)
        return bits

    def cost(self, query: Query) -> int:
        """Return the largest number of bytes to read for a query: the sum over its lists."""
        if isinstance(query, int):
            start, stop = self._range(query)
            return stop - start
        return sum(map(self.cost, query.of))

    def _list(self, trigram: int) -> NDArray[np.uint8]:
        from harness1.retrieval.grep import kernels

        start, stop = self._range(trigram)
        self._lists.check(start, stop)
        encoded: NDArray[np.uint8] = self._lists.values[start:stop]
        size = _bitmap_bytes(len(self._blocks) - 1)
        if len(encoded) == size:
            return encoded
        bits = np.zeros(size, np.uint8)
        if not kernels.read_list(encoded, bits):
            raise DamagedFile("trigrams.lists.npy is damaged: it names blocks that do not exist")
        return bits

    def _range(self, trigram: int) -> tuple[int, int]:
        from harness1.retrieval.grep import kernels

        bucket = kernels.bucket_of(trigram)
        return int(self._starts[bucket]), int(self._starts[bucket + 1])


def _cut(ends: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return where the blocks begin and the last one ends, in chunks."""
    stretches = ends[:-1] // BLOCK_BYTES
    return np.append(np.flatnonzero(np.diff(stretches, prepend=-1)), len(stretches)).astype(np.int32)


def _bitmap_bytes(blocks: int) -> int:
    return -(-blocks // 8)
