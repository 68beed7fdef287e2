"""The one total order of every ranking: score rounded to 1e-4 of the top score, descending, then chunk id.

Sums of floating point numbers differ in their last digits between machines. Rounded scores do so only in rare
borderline cases, and ids break ties, so a ranking and its cut at k are the same wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from harness1.records import ChunkId

STEP = 1e-4
"""Scores nearer than this share of the top score may count as equal."""


def score_levels(scores: NDArray[np.floating], top: float) -> NDArray[np.float64]:
    """Return scores as whole multiples of `STEP * |top|`, or of `STEP` if the top is 0."""
    rounded: NDArray[np.float64] = np.rint(scores.astype(np.float64) / ((abs(top) or 1.0) * STEP))
    return rounded


def total_order(scored: Iterable[tuple[ChunkId, float]], k: int | None = None) -> list[tuple[ChunkId, float]]:
    """Return the best `k` pairs of id and score, or all of them, best first.

    Args:
        scored: ids, each once, with any finite scores; higher is better.
    """
    pairs = list(scored)
    if not pairs:
        return []
    scores = np.array([score for _, score in pairs], dtype=np.float64)
    levels = score_levels(scores, float(scores.max())).tolist()
    order = sorted(range(len(pairs)), key=lambda at: (-levels[at], pairs[at][0]))
    return [pairs[at] for at in order[:k]]


def best_first(scores: NDArray[np.floating], ranks: NDArray[np.integer], k: int | None = None) -> NDArray[np.intp]:
    """Return the places of the best `k` scores, or of all of them, in the total order.

    Args:
        scores: any finite scores of chunks; higher is better.
        ranks: for each of the chunks, the place of its id among all ids in lexicographic order.
    """
    order: NDArray[np.intp] = np.lexsort((ranks, -score_levels(scores, float(scores.max(initial=-np.inf)))))
    return order[:k]


def rrf(
    rankings: Sequence[Sequence[ChunkId]], k: float = 60, weights: Sequence[float] | None = None
) -> list[tuple[ChunkId, float]]:
    """Return every id of the rankings with the sum of `weight / (k + rank)`, best first, in the total order.

    Ranks count from 1; a ranking that lacks an id gives it nothing. An id that occurs twice in a ranking counts at its
    first place. From: Cormack, Clarke, Buettcher, "Reciprocal rank fusion outperforms Condorcet and individual rank
    learning methods", SIGIR 2009.

    Raises:
        ValueError: there are not as many weights as rankings.
    """
    scores: dict[ChunkId, float] = {}
    for ranking, weight in zip(rankings, weights or [1.0] * len(rankings), strict=True):
        for rank, chunk_id in enumerate(dict.fromkeys(ranking), start=1):
            scores[chunk_id] = scores.get(chunk_id, 0.0) + weight / (k + rank)
    return total_order(scores.items())
