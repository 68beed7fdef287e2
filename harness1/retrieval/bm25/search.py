"""BM25 over the segments of an index.

The score of a chunk is the sum over the terms of the query, each as often as it occurs there, of

    ln(1 + (N - n + 0.5) / (n + 0.5)) * f / (f + k1 * (1 - b + b * length / mean length))

with N chunks in all, n of them with the term, and f occurrences in this one: Lucene's variant, exact lengths
(Kamphuis et al., "Which BM25 do you mean?", ECIR 2020). N, n and the mean length count all segments together and leave
out deleted chunks, so scores are the same, bit for bit, however the corpus is divided into segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harness1.retrieval.analyser import Analyser
from harness1.retrieval.bm25.postings import Postings
from harness1.retrieval.ordering import STEP, best_first

NONE = np.empty(0, np.uint32)


class BM25:
    """Searches all segments as one.

    Args:
        segments: in corpus order; positions are numbered through all of them.
        chunks: the number of chunks that are not deleted.
        length: their total length, in terms.
        ranks: for each position, the place of its id among all ids in lexicographic order; it breaks ties.
    """

    def __init__(
        self,
        segments: Sequence[Postings],
        chunks: int,
        length: int,
        ranks: NDArray[np.int32],
        k1: float,
        b: float,
        analyser: Analyser,
    ) -> None:
        self._analyser = analyser
        self._segments = segments
        self._firsts = np.cumsum([0, *map(len, segments)])
        self._chunks = chunks
        self._ranks = ranks
        mean = length / chunks if length else 1.0
        self._tables = [_shares(segment.pairs, mean, k1, b) for segment in segments]

    def search(self, query: str, k: int, exclude: NDArray[np.int64] | None = None) -> list[tuple[int, float]]:
        """Return the positions of the best `k` chunks with their scores, in the total order
        (`harness1.retrieval.ordering`).

        Chunks without a term of the query are left out. So are excluded chunks (by position), which do not count for
        the top score either, to which the order is relative.
        """
        return self.search_terms(self._analyser.terms(query), k, exclude)

    def search_terms(
        self, terms: Sequence[str], k: int, exclude: NDArray[np.int64] | None = None
    ) -> list[tuple[int, float]]:
        """Search for a query that is already analysed."""
        if k < 1 or not terms:
            return []
        from harness1.retrieval.bm25.kernels import best

        counts = Counter(terms)
        numbers = [segment.numbers(list(counts)) for segment in self._segments]
        spans = [segment.spans(found) for segment, found in zip(self._segments, numbers, strict=True)]
        weights = self._weights(counts, numbers, spans)
        margin = 2 * STEP * float(weights.sum())
        positions, scores = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for segment, span, table, first in zip(
            self._segments, spans, self._tables, self._firsts.tolist(), strict=False
        ):
            left_out = _local(exclude, first, len(segment))
            found, found_scores = best(
                segment.chunks, segment.codes, span, weights, table, len(segment), segment.dead, left_out, k, margin
            )
            positions.append(found.astype(np.int64) + first)
            scores.append(found_scores)
        together, their_scores = np.concatenate(positions), np.concatenate(scores)
        order = best_first(their_scores, self._ranks[together], k)
        return list(zip(together[order].tolist(), their_scores[order].tolist(), strict=True))

    def _weights(
        self, counts: Counter[str], numbers: list[NDArray[np.int64]], spans: list[NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        """Return the weight of each term: its inverse document frequency, times its occurrences in the query."""
        frequencies = np.zeros(len(counts), np.int64)
        for segment, found, span in zip(self._segments, numbers, spans, strict=True):
            frequencies += segment.frequencies(found, span)
        rarity = np.log1p((self._chunks - frequencies + 0.5) / (frequencies + 0.5))
        return (rarity * np.fromiter(counts.values(), np.float64, len(counts))).astype(np.float32)


def _shares(pairs: NDArray[np.int32], mean: float, k1: float, b: float) -> NDArray[np.float32]:
    """Return the share of a term's weight that each pair (occurrences, length) earns."""
    counts, lengths = pairs[:, 0].astype(np.float64), pairs[:, 1]
    return (counts / (counts + k1 * (1 - b + b * lengths / mean))).astype(np.float32)


def _local(positions: NDArray[np.int64] | None, first: int, size: int) -> NDArray[np.uint32]:
    """Return the positions within a segment, as sorted chunk numbers of it."""
    if positions is None or not len(positions):
        return NONE
    ordered = np.sort(positions)
    low, high = np.searchsorted(ordered, (first, first + size))
    return (ordered[low:high] - first).astype(np.uint32)
