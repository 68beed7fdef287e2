"""The retriever of an index folder on this machine: plain functions under one thin asynchronous adapter.

A search by terms takes about a millisecond, so it runs on the event loop itself, which runs other work between
requests; long queries and long lists of hits run in one worker thread. So do models, on batches of requests from
concurrent episodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from harness1.config import Config, Machine, Retrieval
from harness1.errors import CorpusError, UsageError
from harness1.hashing import digest
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.batching import Batcher
from harness1.retrieval.dense.cross_encoder import PairScorer, open_cross_encoder
from harness1.retrieval.dense.embedder import CachedQueries, Embedder, open_embedder
from harness1.retrieval.grep.search import grep_segments
from harness1.retrieval.index.index import EmbeddedIndex, open_index
from harness1.retrieval.index.ranker import Ranker, ranking_mode
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, SearchRequest, SearchResult

ENGINE_ERRORS = (OSError, ValueError, LookupError, MemoryError, RuntimeError)
"""Errors that reading a damaged or vanished index, or a failing model, may raise."""
LONG_QUERY, LONG_LIST = 4096, 256
"""Characters of a query, and hits, from which a search takes too long for the event loop."""
Found = SearchResult | RetrievalFault


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
        _map_embeddings(path, index)
        embedder = CachedQueries(open_embedder(index.settings.dense, config.machine), config.machine.cached_searches)
        if embedder.hash != index.vectors.embedder:
            raise UsageError(
                f"{path} was built with another embedding model than the one at hand: set machine.embedder"
            )
    scorer = open_cross_encoder(config.machine) if ranking.rerank.on else None
    return EmbeddedRetriever(index, ranking, config.machine, embedder, scorer)


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
        self._batcher = (
            Batcher(self._answer, machine.batch_ms / 1000, machine.batch_size) if embedder or scorer else None
        )
        self._beside = Batcher(self._answer, 0.0, 1)
        self.info = info_of(index, scorer)

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        now = time.monotonic()
        asked = [_Timed(request, now + request.deadline) for request in requests]
        if self._batcher:
            return await _in_time(self._batcher, asked, max((request.deadline for request in requests), default=0.0))
        answers: list[Found] = []
        for each in asked:
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

    def _answer(self, asked: Sequence[_Timed]) -> list[Found]:
        """Answer a batch. If it fails as a whole, answer each request on its own, so that one cannot fail the
        others."""
        now = time.monotonic()
        open_places = [place for place, each in enumerate(asked) if each.end >= now]
        answers: list[Found] = [RetrievalFault(message="deadline")] * len(asked)
        try:
            found: list[Found] = [*self._ranker.search([asked[place].request for place in open_places])]
        except ENGINE_ERRORS as error:
            if len(open_places) > 1:
                return [answer for each in asked for answer in self._answer([each])]
            found = [_fault(error)]
        for place, answer in zip(open_places, found, strict=True):
            answers[place] = answer
        return answers


class _Timed(Record):
    """A request and its deadline, on the monotonic clock."""

    request: SearchRequest
    end: float


async def _in_time(thread: Batcher[_Timed, Found], asked: Sequence[_Timed], deadline: float) -> list[Found]:
    try:
        async with asyncio.timeout(deadline):
            return await thread.submit(asked)
    except TimeoutError:
        return [RetrievalFault(message="deadline")] * len(asked)


def _map_embeddings(path: Path, index: EmbeddedIndex) -> None:
    """Open the embeddings now: at the first search, their files may be gone with the generation that they belong to."""
    try:
        index.dense  # noqa: B018
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"the embeddings of {path} are damaged ({error}); build it again with: harness1 index --force"
        ) from error


def info_of(index: EmbeddedIndex, scorer: PairScorer | None) -> IndexInfo:
    """Return the facts about an index. A reranker decides rankings as the corpus does, so it is part of the hash."""
    info = index.info
    if scorer is None:
        return info
    return IndexInfo(digest([info.index_hash, scorer.hash]), info.unit, info.documents, info.chunks)


def _fault(error: Exception) -> RetrievalFault:
    return RetrievalFault(message=f"{type(error).__name__}: {error}")
