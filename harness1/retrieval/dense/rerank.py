"""Reranking: orders the best chunks of a ranking by a model that reads query and chunk together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from harness1.records import Chunk
from harness1.retrieval.dense.cross_encoder import PairScorer
from harness1.retrieval.ordering import total_order
from harness1.retrieval.protocol import Scored

SMALLEST, LARGEST = 1e-30, 1.0 - 2.0**-24
"""The range of probabilities whose log odds are finite and distinct as 32-bit numbers."""


def rerank(
    queries: Sequence[str], rankings: Sequence[Sequence[Chunk]], scorer: PairScorer, candidates: int
) -> list[list[Scored]]:
    """Return all chunks of each query's ranking, rescored, best first, in the total order.

    The scorer reads the first `candidates` of each as title, line break and text, all in one call, and equal pairs
    once. Their scores are the log odds of its probabilities, which keep values near 0 and near 1 distinct. The other
    chunks follow in their earlier order, with scores that fall by 1 each from the lowest.

    Args:
        rankings: for each query its chunks, best first, each once.
    """
    read = [
        [(query, f"{chunk.title}\n{chunk.text}") for chunk in chunks[:candidates]]
        for query, chunks in zip(queries, rankings, strict=True)
    ]
    pairs = list(dict.fromkeys(chain.from_iterable(read)))
    odds = dict(zip(pairs, _log_odds(scorer.score(pairs)), strict=True)) if pairs else {}
    return [_reordered(chunks, [odds[pair] for pair in each]) for chunks, each in zip(rankings, read, strict=True)]


def _reordered(chunks: Sequence[Chunk], scores: Sequence[float]) -> list[Scored]:
    """Return the first chunks by their scores, then those without a score."""
    by_id = {chunk.chunk_id: chunk for chunk in chunks}
    order = total_order((chunk.chunk_id, score) for chunk, score in zip(chunks, scores, strict=False))
    lowest = min(scores, default=0.0)
    behind = [Scored(chunk, lowest - place) for place, chunk in enumerate(chunks[len(scores) :], start=1)]
    return [Scored(by_id[chunk_id], score) for chunk_id, score in order] + behind


def _log_odds(probabilities: NDArray[np.float32]) -> list[float]:
    """Return ln(p / (1 - p)), which for a model with one label is its output before the sigmoid."""
    clipped = np.clip(probabilities.astype(np.float64), SMALLEST, LARGEST)
    odds: list[float] = (np.log(clipped) - np.log1p(-clipped)).tolist()
    return odds
