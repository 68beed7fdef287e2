"""Ranks over an opened index: by terms, by embeddings, or by both fused, and reranked by a cross-encoder if wanted.

Plain functions over batches of searches. The result of a search does not depend on its batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from harness1.config import Retrieval
from harness1.errors import ConfigError
from harness1.records import ChunkId
from harness1.retrieval.dense.cross_encoder import PairScorer
from harness1.retrieval.dense.embedder import Embedder
from harness1.retrieval.dense.rerank import rerank
from harness1.retrieval.index.index import EmbeddedIndex
from harness1.retrieval.ordering import rrf
from harness1.retrieval.protocol import Scored, SearchRequest, SearchResult

if TYPE_CHECKING:
    from harness1.retrieval.dense.search import DenseIndex

Mode = Literal["bm25", "dense", "hybrid"]
Positions = list[tuple[int, float]]


def ranking_mode(settings: Retrieval, index: EmbeddedIndex) -> Mode:
    """Return the mode that `auto` stands for in an index.

    Raises:
        ConfigError: embeddings are asked for and the index has none.
    """
    if settings.mode == "auto":
        return "hybrid" if index.vectors else "bm25"
    if settings.mode != "bm25" and not index.vectors:
        raise ConfigError(
            f"env.retrieval.mode={settings.mode} needs an index with embeddings: "
            "build it with --set index.dense.model=NAME"
        )
    return settings.mode


class Ranker:
    """Ranks the chunks of an index.

    Args:
        embedder: embeds queries; needed unless `ranking_mode` is `bm25`.
        scorer: reranks; needed if `settings.rerank.on`.
    """

    def __init__(
        self, index: EmbeddedIndex, settings: Retrieval, embedder: Embedder | None, scorer: PairScorer | None
    ) -> None:
        self.mode = ranking_mode(settings, index)
        self._index, self._settings, self._embedder, self._scorer = index, settings, embedder, scorer

    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        """Answer a batch of requests; the caller watches the deadlines.

        `stage_ms` of each result is how long each stage took for the whole batch.

        Raises:
            ValueError, RuntimeError: a model failed; OSError, IndexError: reading the index did.
        """
        clock = _Clock()
        excludes = [np.array(self._index.positions(request.exclude), np.int64) for request in requests]
        lists: list[list[Positions]] = []
        weights: list[float] = []
        if self.mode != "dense":
            lists.append(self._by_terms(requests, excludes))
            weights.append(self._settings.bm25_weight)
            clock.lap("bm25")
        if self.mode != "bm25":
            lists.append(self._by_embeddings(requests, excludes))
            weights.append(self._settings.dense_weight)
            clock.lap("dense")
        ranked = [
            self._fuse([found[number] for found in lists], weights, self._depth(request.k))
            for number, request in enumerate(requests)
        ]
        if len(lists) > 1:
            clock.lap("fuse")
        hits = [[Scored(self._index.chunk(position), score) for position, score in each] for each in ranked]
        before: list[tuple[ChunkId, ...]] = [()] * len(requests)
        if self._scorer:
            before = [tuple(hit.chunk.chunk_id for hit in each) for each in hits]
            hits = self._rerank(requests, hits, self._scorer)
            clock.lap("rerank")
        hits = [each[: request.k] for request, each in zip(requests, hits, strict=True)]
        if self.mode != "bm25" and any(request.about for request in requests):
            hits = self._compared(requests, hits)
            clock.lap("compare")
        return [SearchResult(tuple(each), ids, clock.laps) for each, ids in zip(hits, before, strict=True)]

    def _compared(self, requests: Sequence[SearchRequest], hits: list[list[Scored]]) -> list[list[Scored]]:
        """Compare hits with the texts that their requests are about."""
        dense, embedder = self._embeddings()
        texts = list(dict.fromkeys(request.about for request in requests if request.about))
        about = dict(zip(texts, embedder.embed_queries(texts), strict=True))
        return [
            self._likened(each, dense, about[request.about]) if request.about else each
            for request, each in zip(requests, hits, strict=True)
        ]

    def _likened(self, hits: list[Scored], dense: DenseIndex, about: NDArray[np.float32]) -> list[Scored]:
        positions = self._index.positions([hit.chunk.chunk_id for hit in hits])
        cosines = dense.cosines(about, np.array(positions, np.int64)).tolist()
        return [structs.replace(hit, likeness=round(cosine, 6)) for hit, cosine in zip(hits, cosines, strict=True)]

    def _depth(self, k: int) -> int:
        """Return how many chunks of a ranking are needed."""
        return max(k, self._settings.rerank.candidates) if self._scorer else k

    def _by_terms(self, requests: Sequence[SearchRequest], excludes: Sequence[NDArray[np.int64]]) -> list[Positions]:
        depth = self._settings.bm25_depth if self.mode == "hybrid" else 0
        return [
            self._index.bm25.search(request.query, max(depth, self._depth(request.k)), exclude)
            for request, exclude in zip(requests, excludes, strict=True)
        ]

    def _by_embeddings(
        self, requests: Sequence[SearchRequest], excludes: Sequence[NDArray[np.int64]]
    ) -> list[Positions]:
        dense, embedder = self._embeddings()
        depth = self._settings.dense_depth if self.mode == "hybrid" else 0
        queries = embedder.embed_queries([request.query for request in requests])
        depths = [max(depth, self._depth(request.k)) for request in requests]
        return dense.search(queries, depths, excludes)

    def _embeddings(self) -> tuple[DenseIndex, Embedder]:
        if self._index.dense is None or self._embedder is None:
            raise ValueError("no embeddings, or nothing to embed queries with")
        return self._index.dense, self._embedder

    def _fuse(self, lists: Sequence[Positions], weights: Sequence[float], k: int) -> list[tuple[int, float]]:
        """Return the best `k` of one list, or of several by reciprocal rank fusion."""
        if len(lists) == 1:
            return lists[0][:k]
        places = list(dict.fromkeys(position for found in lists for position, _ in found))
        names = dict(zip(places, self._index.chunk_ids(places), strict=True))
        positions = {name: position for position, name in names.items()}
        fused = rrf([[names[position] for position, _ in found] for found in lists], self._settings.rrf_k, weights)
        return [(positions[name], score) for name, score in fused[:k] if score > 0]

    def _rerank(
        self, requests: Sequence[SearchRequest], hits: Sequence[Sequence[Scored]], scorer: PairScorer
    ) -> list[list[Scored]]:
        queries = [request.query for request in requests]
        rankings = [[hit.chunk for hit in each] for each in hits]
        return rerank(queries, rankings, scorer, self._settings.rerank.candidates)


class _Clock:
    """Milliseconds of the stages of a batch."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage] = (now - self._last) * 1000
        self._last = now
