"""The retriever of an index folder on this machine: ranking by terms, by embeddings or by both fused, with a reranker
if wanted, under one thin asynchronous adapter. The result of a search does not depend on its batch.

A search by terms takes about a millisecond, so it runs on the event loop itself, which runs other work between
requests; long queries and long lists of hits run in one worker thread. So do models, on batches of requests from
concurrent episodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import structs

from harness1.config import Config, Machine, Retrieval
from harness1.errors import ConfigError, CorpusError, UsageError
from harness1.plain import digest
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.cross_encoder import PairScorer, open_cross_encoder, rerank
from harness1.retrieval.embedder import CachedQueries, Embedder, open_embedder
from harness1.retrieval.grep import grep_segments
from harness1.retrieval.index import EmbeddedIndex, open_index
from harness1.retrieval.protocol import (
    BM25_DEPTH,
    DENSE_DEPTH,
    RRF_K,
    BadPattern,
    Found,
    IndexInfo,
    RetrievalFault,
    Scored,
    SearchRequest,
    SearchResult,
    rrf,
)
from harness1.retrieval.sharing import BATCH_SIZE, CACHED_SEARCHES, WINDOW_S, Batcher

if TYPE_CHECKING:
    from harness1.retrieval.dense import DenseIndex

ENGINE_ERRORS = (OSError, ValueError, LookupError, MemoryError, RuntimeError)
"""Errors that reading a damaged or vanished index, or a failing model, may raise."""
LONG_QUERY, LONG_LIST = 4096, 256
"""Characters of a query, and hits, from which a search takes too long for the event loop."""

Mode = Literal["bm25", "dense", "hybrid"]
Positions = list[tuple[int, float]]

RERANKED = 50
"""Number of top chunks that a cross-encoder reads."""


def open_embedded(path: Path, config: Config) -> EmbeddedRetriever:
    """Open an index folder, and the models that the configuration ranks with.

    Raises:
        CorpusError, SchemaError: the folder is not an index, is damaged, or was built by a newer version.
        ConfigError: embeddings are asked for and the index has none, or no reranker is named.
        UsageError: a model does not load, or is not the one that the index was built with.
        MissingExtra: the package of a model, or faiss, is not installed.
    """
    index = open_index(path)
    ranking = config.env.retrieval
    embedder = None
    if index.vectors and ranking_mode(ranking, index) != "bm25":
        try:
            index.dense  # noqa: B018  # at the first search, its files may be gone with the generation
        except (OSError, ValueError) as error:
            raise CorpusError(
                f"the embeddings of {path} are damaged ({error}); build it again with: harness1 index --force"
            ) from error
        embedder = CachedQueries(open_embedder(index.settings.dense, config.machine), CACHED_SEARCHES)
        if embedder.hash != index.vectors.embedder:
            raise UsageError(
                f"{path} was built with another embedding model than the one at hand: set machine.embedder"
            )
    scorer = open_cross_encoder(config.machine) if ranking.rerank.on else None
    return EmbeddedRetriever(index, ranking, config.machine, embedder, scorer)


def ranking_mode(settings: Retrieval, index: EmbeddedIndex) -> Mode:
    """Return the mode that `auto` stands for in an index. Raises ConfigError: embeddings are asked for and the index
    has none."""
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
        self._index, self._embedder, self._scorer = index, embedder, scorer

    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        """Answer a batch of requests; the caller watches the deadlines.

        `stage_ms` of each result is how long each stage took for the whole batch. Raises ValueError, RuntimeError: a
        model failed; OSError, IndexError: reading the index did."""
        clock, scorer = _Clock(), self._scorer
        queries = [request.query for request in requests]
        excludes = [np.array(self._index.positions(request.exclude), np.int64) for request in requests]
        candidates = RERANKED if scorer else 0
        depths = [max(request.k, candidates) for request in requests]
        lists: list[list[Positions]] = []
        if self.mode != "dense":
            least = BM25_DEPTH if self.mode == "hybrid" else 0
            each = zip(queries, depths, excludes, strict=True)
            lists.append([self._index.bm25.search(query, max(least, k), exclude) for query, k, exclude in each])
            clock.lap("bm25")
        if self.mode != "bm25":
            dense, embedder = self._embeddings()
            least = DENSE_DEPTH if self.mode == "hybrid" else 0
            lists.append(dense.search(embedder.embed_queries(queries), [max(least, k) for k in depths], excludes))
            clock.lap("dense")
        ranked = [self._fuse([found[at] for found in lists], k) for at, k in enumerate(depths)]
        if len(lists) > 1:
            clock.lap("fuse")
        hits = [[Scored(self._index.chunk(position), score) for position, score in each] for each in ranked]
        before: list[tuple[ChunkId, ...]] = [()] * len(requests)
        if scorer:
            before = [tuple(hit.chunk.chunk_id for hit in each) for each in hits]
            hits = rerank(queries, [[hit.chunk for hit in each] for each in hits], scorer, candidates)
            clock.lap("rerank")
        hits = [each[: request.k] for request, each in zip(requests, hits, strict=True)]
        if self.mode != "bm25" and any(request.about for request in requests):
            hits = self._compare(requests, hits)
            clock.lap("compare")
        return [SearchResult(tuple(each), ids, clock.laps) for each, ids in zip(hits, before, strict=True)]

    def _embeddings(self) -> tuple[DenseIndex, Embedder]:
        if self._index.dense is None or self._embedder is None:
            raise ValueError("no embeddings, or nothing to embed queries with")
        return self._index.dense, self._embedder

    def _fuse(self, lists: Sequence[Positions], k: int) -> Positions:
        """Return the best `k` of one list, or of several by reciprocal rank fusion."""
        if len(lists) == 1:
            return lists[0][:k]
        places = list(dict.fromkeys(position for found in lists for position, _ in found))
        names = dict(zip(places, self._index.chunk_ids(places), strict=True))
        positions = {name: position for position, name in names.items()}
        fused = rrf([[names[position] for position, _ in found] for found in lists], RRF_K)
        return [(positions[name], score) for name, score in fused[:k] if score > 0]

    def _compare(self, requests: Sequence[SearchRequest], hits: Sequence[list[Scored]]) -> list[list[Scored]]:
        """Return hits with their likeness to the texts that their requests are about."""
        dense, embedder = self._embeddings()
        texts = list(dict.fromkeys(request.about for request in requests if request.about))
        about = dict(zip(texts, embedder.embed_queries(texts), strict=True))
        compared = []
        for request, found in zip(requests, hits, strict=True):
            if request.about:
                positions = self._index.positions([hit.chunk.chunk_id for hit in found])
                cosines = dense.cosines(about[request.about], np.array(positions, np.int64)).tolist()
                pairs = zip(found, cosines, strict=True)
                compared.append([structs.replace(hit, likeness=round(cosine, 6)) for hit, cosine in pairs])
            else:
                compared.append(found)
        return compared


class _Clock:
    """Milliseconds of the stages of a batch."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage] = (now - self._last) * 1000
        self._last = now


class EmbeddedRetriever:
    """`Retriever` over an opened index."""

    def __init__(
        self,
        index: EmbeddedIndex,
        settings: Retrieval = Retrieval(mode="bm25"),
        machine: Machine = Machine(),
        embedder: Embedder | None = None,
        scorer: PairScorer | None = None,
    ) -> None:
        self._index = index
        self._ranker = Ranker(index, settings, embedder, scorer)
        self._batcher = Batcher(self._answer, WINDOW_S, BATCH_SIZE) if embedder or scorer else None
        self._beside = Batcher(self._answer, 0.0, 1)
        self.info = info_of(index, scorer)

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        now = time.monotonic()
        timed = [_Timed(request, now + request.deadline) for request in requests]
        if self._batcher:
            return await _in_time(self._batcher, timed, max((request.deadline for request in requests), default=0.0))
        answers: list[Found] = []
        for each in timed:
            if len(each.request.query) > LONG_QUERY or each.request.k > LONG_LIST:
                answers += await _in_time(self._beside, [each], each.end - time.monotonic())
            else:
                answers += self._answer([each])
                await asyncio.sleep(0)
        return answers

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        steps = grep_segments(self._index.segments, pattern, limit, deadline)
        try:
            while True:
                next(steps)
                await asyncio.sleep(0)
        except StopIteration as done:
            found = done.value
        except ENGINE_ERRORS as error:
            return _fault(error)
        if isinstance(found, BadPattern | RetrievalFault):
            return found
        return tuple(self._index.chunk(self._index.position(segment, number)) for segment, number in found)

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        try:
            return await self._chunks(self._index.positions_of(doc_id))
        except ENGINE_ERRORS as error:
            return _fault(error)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        try:
            return await self._chunks(self._index.positions(chunk_ids))
        except ENGINE_ERRORS as error:
            return _fault(error)

    async def _chunks(self, positions: Sequence[int]) -> tuple[Chunk, ...]:
        """Return chunks, and let the event loop run other work in between."""
        chunks: list[Chunk] = []
        for start in range(0, len(positions), LONG_LIST):
            chunks += map(self._index.chunk, positions[start : start + LONG_LIST])
            await asyncio.sleep(0)
        return tuple(chunks)

    def _answer(self, batch: Sequence[_Timed]) -> list[Found]:
        """Answer a batch. If it fails as a whole, answer each request on its own, so that one cannot fail the
        others."""
        now = time.monotonic()
        open_places = [place for place, each in enumerate(batch) if each.end >= now]
        answers: list[Found] = [RetrievalFault(message="deadline")] * len(batch)
        try:
            found: list[Found] = [*self._ranker.search([batch[place].request for place in open_places])]
        except ENGINE_ERRORS as error:
            if len(open_places) > 1:
                return [answer for each in batch for answer in self._answer([each])]
            found = [_fault(error)]
        for place, answer in zip(open_places, found, strict=True):
            answers[place] = answer
        return answers


class _Timed(Record):
    """A request and its deadline, on the monotonic clock."""

    request: SearchRequest
    end: float


async def _in_time(thread: Batcher[_Timed, Found], batch: Sequence[_Timed], deadline: float) -> list[Found]:
    try:
        async with asyncio.timeout(deadline):
            return await thread.submit(batch)
    except TimeoutError:
        return [RetrievalFault(message="deadline")] * len(batch)


def info_of(index: EmbeddedIndex, scorer: PairScorer | None) -> IndexInfo:
    """Return the facts about an index. A reranker decides rankings as the corpus does, so it is part of the hash."""
    info = index.info
    if scorer is None:
        return info
    return IndexInfo(digest([info.index_hash, scorer.hash]), info.unit, info.documents, info.chunks)


def _fault(error: Exception) -> RetrievalFault:
    return RetrievalFault(message=f"{type(error).__name__}: {error}")
