"""Reciprocal rank fusion: merges rankings without comparing their scores."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.records import ChunkId
from harness1.retrieval.ordering import total_order


def rrf(
    rankings: Sequence[Sequence[ChunkId]], k: float = 60, weights: Sequence[float] | None = None
) -> list[tuple[ChunkId, float]]:
    """Return every id of the rankings with the sum of `weight / (k + rank)`, best first, in the total order.

    Ranks count from 1; a ranking that lacks an id gives it nothing. An id that stands twice in a ranking counts where
    it stands first. From: Cormack, Clarke, Buettcher, "Reciprocal rank fusion outperforms Condorcet and individual
    rank learning methods", SIGIR 2009.

    Raises:
        ValueError: there are not as many weights as rankings.
    """
    scores: dict[ChunkId, float] = {}
    for ranking, weight in zip(rankings, weights or [1.0] * len(rankings), strict=True):
        for rank, chunk_id in enumerate(dict.fromkeys(ranking), start=1):
            scores[chunk_id] = scores.get(chunk_id, 0.0) + weight / (k + rank)
    return total_order(scores.items())
