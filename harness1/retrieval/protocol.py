"""The protocol between the environment and retrieval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness1.config import Retrieval
from harness1.config.settings import Count
from harness1.errors import ConfigError
from harness1.records import Chunk, ChunkId, DocId, Record, Unit


class SearchRequest(Record):
    """One query. Chunks in `exclude` are left out; `deadline` is in seconds from now."""

    query: str
    k: Count
    exclude: frozenset[ChunkId] = frozenset()
    deadline: float = 30.0
    about: str = ""
    """A text that the embeddings of the results are compared with; empty: none."""


class Scored(Record):
    """A chunk with the engine's score of it; higher is better."""

    chunk: Chunk
    score: float
    likeness: float | None = None
    """Cosine with the embedding of the request's `about`; None if the engine does not compare."""


class SearchResult(Record):
    """The chunks that a query found, best first, in the total order: by score rounded to 1e-4 of the top, then id."""

    hits: tuple[Scored, ...] = ()
    pre_rerank_ids: tuple[ChunkId, ...] = ()
    """The chunks that a reranker was given, in their earlier order; empty without one."""
    stage_ms: dict[str, float] = {}
    """Milliseconds of each stage, for the whole batch that answered the request."""


class RetrievalFault(Record):
    """The failure of an engine. It is a value, so that the other queries of a batch keep their results."""

    message: str


Found = SearchResult | RetrievalFault


class BadPattern(Record):
    """A faulty regular expression, which is the policy's mistake; `reason` says what is wrong."""

    reason: str


class IndexInfo(Record):
    """The facts about an index that need none of its data."""

    index_hash: str
    unit: Unit
    documents: int
    chunks: int
    language: str = ""
    """`index.language`; empty in engines that have no terms."""


class Retriever(Protocol):
    """Search, grep and read over one corpus. Implementations are safe to share between concurrent episodes."""

    @property
    def info(self) -> IndexInfo: ...

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        """Answer each request in order; a failing request does not fail the others."""

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        """Return the first `limit` chunks, in corpus order, whose text matches an RE2 pattern."""

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        """Return all chunks of a document in order; none if the corpus lacks it."""

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        """Return the named chunks, in the order asked; ids that the corpus lacks are left out."""


Mode = Literal["bm25", "dense", "hybrid"]


def ranking_mode(settings: Retrieval, has_embeddings: bool) -> Mode:
    """Return the mode that `auto` stands for in an index. Raises ConfigError: it lacks the embeddings."""
    if settings.mode == "auto":
        return "hybrid" if has_embeddings else "bm25"
    if settings.mode != "bm25" and not has_embeddings:
        need = f"env.retrieval.mode={settings.mode} needs an index with embeddings"
        raise ConfigError(f"{need}: build it with --set index.dense.model=NAME")
    return settings.mode


Id = TypeVar("Id", bound=str | int)
STEP = 1e-4
"""Scores nearer than this share of the top score may count as equal."""


def best_first(scores: NDArray[np.floating], ranks: NDArray[np.integer], k: int | None = None) -> NDArray[np.intp]:
    """Return the places of the best `k` scores in the total order; `ranks` are the places of their ids in order."""
    top = float(scores.max(initial=-np.inf))
    levels: NDArray[np.float64] = np.rint(scores.astype(np.float64) / ((abs(top) or 1.0) * STEP))
    order: NDArray[np.intp] = np.lexsort((ranks, -levels))
    return order[:k]


def total_order(scored: Iterable[tuple[Id, float]], k: int | None = None) -> list[tuple[Id, float]]:
    """Return the best `k` pairs, or all, of distinct ids and finite scores (higher is better), best first."""
    pairs = sorted(scored)
    scores = np.array([score for _, score in pairs], dtype=np.float64)
    return [pairs[at] for at in best_first(scores, np.arange(len(pairs)), k).tolist()]


RRF_K = 60
"""Constant of reciprocal rank fusion, 1 / (k + rank): the larger, the less the first ranks stand out."""
BM25_DEPTH, DENSE_DEPTH = 25, 25
"""Chunks of the lists by terms and by embeddings that take part in fusion; never fewer than requested."""


def rrf(rankings: Iterable[Sequence[Id]], k: float = RRF_K) -> list[tuple[Id, float]]:
    """Return every id of the rankings with the sum of `1 / (k + rank)`, best first, in the total order. Ranks count
    from 1; an id counts at its first place in each ranking. From: Cormack, Clarke, Buettcher, "Reciprocal rank fusion
    outperforms Condorcet and individual rank learning methods", SIGIR 2009."""
    scores: dict[Id, float] = {}
    for ranking in rankings:
        for rank, name in enumerate(dict.fromkeys(ranking), start=1):
            scores[name] = scores.get(name, 0.0) + 1 / (k + rank)
    return total_order(scores.items())
