"""Reranking: the best chunks of a ranking in the order of a model that reads query and chunk together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harness1.records import Chunk, ChunkId
from harness1.retrieval.cross_encoder import PairScorer
from harness1.retrieval.ordering import total_order

SMALLEST, LARGEST = 1e-30, 1.0 - 2.0**-24
"""Between these lie the probabilities whose log odds are finite and tell 32-bit numbers apart."""


def rerank(query: str, chunks: Sequence[Chunk], scorer: PairScorer, candidates: int) -> list[tuple[ChunkId, float]]:
    """All chunks with a score each, best first, in the total order.

    The first `candidates` are read, as title, line break and text. Their scores are the log odds of the scorer's
    probabilities, which keep apart what is nearly certain and what is nearly excluded. The others follow behind in
    their earlier order, with scores that fall by 1 from the lowest.

    Args:
        chunks: best first, each once.
    """
    read = chunks[:candidates]
    if not read:
        return []
    scores = scorer.score([(query, f"{chunk.title}\n{chunk.text}") for chunk in read])
    order = total_order((chunk.chunk_id, odds) for chunk, odds in zip(read, _log_odds(scores), strict=True))
    lowest = min(score for _, score in order)
    behind = [(chunk.chunk_id, lowest - place) for place, chunk in enumerate(chunks[candidates:], start=1)]
    return order + behind


def _log_odds(probabilities: NDArray[np.float32]) -> list[float]:
    """ln(p / (1 - p)): for a model with one label, its output before the sigmoid."""
    clipped = np.clip(probabilities.astype(np.float64), SMALLEST, LARGEST)
    odds: list[float] = (np.log(clipped) - np.log1p(-clipped)).tolist()
    return odds
