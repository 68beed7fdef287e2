"""The one total order of every ranking: score rounded to 1e-4 of the top score, descending, then chunk id.

Sums of floating point numbers differ in their last digits between machines. Rounded scores do not, but for rare
borders, and ids decide among equals: a ranking, and its cut at k, come out the same wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from harness1.records import ChunkId

STEP = 1e-4
"""Scores nearer than this share of the top score may count as equal."""
SHARES = (0.9, 0.8, 0.65, 0.5, 0.25, 0.1)
"""Of the top score: where the search for the k best looks first."""


def score_levels(scores: NDArray[np.floating], top: float) -> NDArray[np.float64]:
    """Scores as whole multiples of `STEP * |top|`; where the top is 0, of `STEP`."""
    rounded: NDArray[np.float64] = np.rint(scores.astype(np.float64) / ((abs(top) or 1.0) * STEP))
    return rounded


def total_order(scored: Iterable[tuple[ChunkId, float]], k: int | None = None) -> list[tuple[ChunkId, float]]:
    """The best `k` pairs of id and score, or all of them, best first.

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


def best_positions(scores: NDArray[np.float32], ranks: NDArray[np.int32], k: int) -> NDArray[np.intp]:
    """The same order over a vector: positions of the best `k` scores above 0, best first.

    Args:
        scores: one score for each chunk of a corpus; 0 means: not found.
        ranks: for each chunk, the place of its id among all ids in lexicographic order.
    """
    top = float(scores.max(initial=0.0))
    if top <= 0.0 or k < 1:
        return np.empty(0, dtype=np.intp)
    # A few passes with a falling border find few candidates sooner than one partition of the whole vector does.
    # Below the border, as much is added as could still share the level of a score above it.
    share = next((share for share in SHARES if np.count_nonzero(scores > share * top) >= k), 0.0)
    found = np.flatnonzero(scores > max(0.0, (share - 2 * STEP) * top))
    order = np.lexsort((ranks[found], -score_levels(scores[found], top)))
    return found[order[:k]]
