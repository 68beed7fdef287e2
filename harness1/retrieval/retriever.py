"""The retriever of an index folder: ranking by terms, by embeddings or by both fused, with a reranker if wanted.

A search by terms takes about a millisecond, so it runs on the event loop itself; long queries and lists of hits run in
one worker thread, and so do models, on batches of requests from concurrent episodes, which change no result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec import structs

from harness1.config import Config, Retrieval
from harness1.errors import CorpusError, InfrastructureFault, Refusal, Unreachable
from harness1.plain import digest
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.grep import grep_segments
from harness1.retrieval.index import EmbeddedIndex, open_index
from harness1.retrieval.models import CachedQueries, Embedder, Scorer, open_cross_encoder, open_embedder, rerank
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
    ranking_mode,
    rrf,
)
from harness1.retrieval.sharing import BATCH_SIZE, WINDOW_S, Batcher

if TYPE_CHECKING:
    from harness1.retrieval.dense import DenseIndex

ENGINE_ERRORS = (OSError, ValueError, LookupError, MemoryError, RuntimeError, Refusal)
"""Errors that reading a damaged or vanished index, or a failing model, may raise."""
SERVER_FAULTS = (InfrastructureFault, Unreachable)
"""What a model's server that does not answer, or not as it should, raises."""
LONG_QUERY, LONG_LIST = 4096, 256
"""Characters of a query, and hits, from which a search takes too long for the event loop."""

RERANKED = 50
"""Number of top chunks that a cross-encoder reads."""
CACHED_QUERIES = 4096

Positions = list[tuple[int, float]]
Timed = tuple[SearchRequest, float]
"""A request and its deadline, on the monotonic clock."""
T = TypeVar("T")


def open_embedded(path: Path, config: Config) -> EmbeddedRetriever:
    """Open an index folder, and the models that the configuration ranks with. Raises CorpusError, SchemaError: it is
    not an index, is damaged, or newer; ConfigError: the ranking needs embeddings or a reranker that are not there;
    UsageError: a model does not load or answer, or did not build the index; InfrastructureFault; MissingExtra."""
    index = open_index(path)
    ranking = config.env.retrieval
    embedder = None
    if index.vectors and ranking_mode(ranking, True) != "bm25":
        try:
            index.dense  # noqa: B018  # at the first search, its files may be gone with the generation
        except (OSError, ValueError) as error:
            said = f"the embeddings of {path} are damaged ({error})"
            raise CorpusError(f"{said}; build it again with: harness1 index --force") from error
        opened = open_embedder(index.settings.dense, config.machine)
        if opened.hash != index.vectors.embedder:
            raise CorpusError(f"{path} was built with another embedding model: set machine.embedder, or build it again")
        embedder = CachedQueries(opened, CACHED_QUERIES)
    scorer = open_cross_encoder(config.machine) if ranking.rerank.on else None
    return EmbeddedRetriever(index, ranking, embedder, scorer)


class EmbeddedRetriever:
    """`Retriever` over an opened index. `embedder` is needed unless its `ranking_mode` is `bm25`, `scorer` if
    `settings.rerank.on`. `scorer` decides rankings as the corpus does, so it is part of the hash."""

    def __init__(
        self,
        index: EmbeddedIndex,
        settings: Retrieval = Retrieval(mode="bm25"),
        embedder: Embedder | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self._index, self._embedder, self._scorer = index, embedder, scorer
        self._mode = ranking_mode(settings, index.vectors is not None)
        self._batcher = Batcher(self._answer, WINDOW_S, BATCH_SIZE) if embedder or scorer else None
        self._beside = Batcher(self._answer, 0.0, 1)
        self.info = index.info
        if scorer:
            made = digest([self.info.index_hash, scorer.hash])
            self.info = IndexInfo(made, self.info.unit, self.info.documents, self.info.chunks)

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        now = time.monotonic()
        timed = [(request, now + request.deadline) for request in requests]
        if self._batcher:
            return await _in_time(self._batcher, timed, max((request.deadline for request in requests), default=0.0))
        answers: list[Found] = []
        for request, end in timed:
            if len(request.query) > LONG_QUERY or request.k > LONG_LIST:
                answers += await _in_time(self._beside, [(request, end)], end - time.monotonic())
            else:
                answers += self._answer([(request, end)])
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
        return tuple(self._index.chunk(self._index.firsts[segment] + number) for segment, number in found)

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        return await self._chunks(self._index.positions_of, doc_id)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        return await self._chunks(self._index.positions, chunk_ids)

    async def _chunks(self, find: Callable[[T], Sequence[int]], what: T) -> tuple[Chunk, ...] | RetrievalFault:
        """Return the chunks at the positions found, and let the event loop run other work in between."""
        chunks: list[Chunk] = []
        try:
            positions = find(what)
            for start in range(0, len(positions), LONG_LIST):
                chunks += map(self._index.chunk, positions[start : start + LONG_LIST])
                await asyncio.sleep(0)
        except ENGINE_ERRORS as error:
            return _fault(error)
        return tuple(chunks)

    def _answer(self, batch: Sequence[Timed]) -> list[Found]:
        """Answer a batch; if it fails, each request on its own, so that one cannot fail the others."""
        now = time.monotonic()
        open_places = [place for place, (_, end) in enumerate(batch) if end >= now]
        answers: list[Found] = [RetrievalFault("deadline")] * len(batch)
        try:
            found: list[Found] = [*self._rank([batch[place][0] for place in open_places])]
        except ENGINE_ERRORS as error:
            if len(open_places) > 1:
                return [answer for each in batch for answer in self._answer([each])]
            found = [_fault(error)]
        except SERVER_FAULTS as error:
            found = [_fault(error)] * len(open_places)
        for place, answer in zip(open_places, found, strict=True):
            answers[place] = answer
        return answers

    def _rank(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        """Answer a batch whatever its deadlines; `stage_ms` is how long each stage took for the whole batch."""
        index, mode, scorer = self._index, self._mode, self._scorer
        marks = [("", time.perf_counter())]
        queries = [request.query for request in requests]
        excludes = [np.array(index.positions(request.exclude), np.int64) for request in requests]
        candidates = RERANKED if scorer else 0
        depths = [max(request.k, candidates) for request in requests]
        lists: list[list[Positions]] = []
        if mode != "dense":
            least = BM25_DEPTH if mode == "hybrid" else 0
            each = zip(queries, depths, excludes, strict=True)
            lists.append([index.bm25.search(query, max(least, k), exclude) for query, k, exclude in each])
            marks.append(("bm25", time.perf_counter()))
        if mode != "bm25":
            dense, embedder = self._embeddings()
            least = DENSE_DEPTH if mode == "hybrid" else 0
            lists.append(dense.search(embedder.embed_queries(queries), [max(least, k) for k in depths], excludes))
            marks.append(("dense", time.perf_counter()))
        if len(lists) > 1:
            lists = [[self._fuse(found) for found in zip(*lists, strict=True)]]
            marks.append(("fuse", time.perf_counter()))
        hits = [
            [Scored(index.chunk(position), score) for position, score in found[:k]]
            for found, k in zip(lists[0], depths, strict=True)
        ]
        before: list[tuple[ChunkId, ...]] = [()] * len(requests)
        if scorer:
            before = [tuple(hit.chunk.chunk_id for hit in each) for each in hits]
            hits = rerank(queries, [[hit.chunk for hit in each] for each in hits], scorer, candidates)
            marks.append(("rerank", time.perf_counter()))
        hits = [each[: request.k] for request, each in zip(requests, hits, strict=True)]
        if mode != "bm25" and any(request.about for request in requests):
            hits = self._compare(requests, hits)
            marks.append(("compare", time.perf_counter()))
        stages = {stage: (end - begin) * 1000 for (_, begin), (stage, end) in pairwise(marks)}
        return [SearchResult(tuple(each), ids, stages) for each, ids in zip(hits, before, strict=True)]

    def _embeddings(self) -> tuple[DenseIndex, Embedder]:
        if self._index.dense is None or self._embedder is None:
            raise ValueError("no embeddings, or nothing to embed queries with")
        return self._index.dense, self._embedder

    def _fuse(self, lists: Sequence[Positions]) -> Positions:
        ranks = {position: int(self._index.ranks[position]) for found in lists for position, _ in found}
        positions = {rank: position for position, rank in ranks.items()}
        fused = rrf([[ranks[position] for position, _ in found] for found in lists], RRF_K)  # ranks are ordered as ids
        return [(positions[rank], score) for rank, score in fused]

    def _compare(self, requests: Sequence[SearchRequest], hits: Sequence[list[Scored]]) -> list[list[Scored]]:
        """Return hits with their likeness to the texts that their requests are about."""
        dense, embedder = self._embeddings()
        compared = []
        about = embedder.embed_queries([request.about for request in requests])
        for request, vector, found in zip(requests, about, hits, strict=True):
            positions = self._index.positions([hit.chunk.chunk_id for hit in found] if request.about else [])
            cosines = dense.cosines(vector, np.array(positions, np.int64)).tolist()
            likenesses = [round(cosine, 6) for cosine in cosines] or [None] * len(found)
            pairs = zip(found, likenesses, strict=True)
            compared.append([structs.replace(hit, likeness=likeness) for hit, likeness in pairs])
        return compared


async def _in_time(thread: Batcher[Timed, Found], batch: Sequence[Timed], deadline: float) -> list[Found]:
    try:
        async with asyncio.timeout(deadline):
            return await thread.submit(batch)
    except TimeoutError:
        return [RetrievalFault("deadline")] * len(batch)


def _fault(error: Exception) -> RetrievalFault:
    return RetrievalFault(f"{type(error).__name__}: {error}")
