"""The retriever of an index folder on this machine: plain functions under one thin asynchronous adapter.

A search takes about a millisecond, so it runs on the event loop itself, which gets its turn between requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.grep import compile_pattern, grep
from harness1.retrieval.index import EmbeddedIndex
from harness1.retrieval.retriever import BadPattern, IndexInfo, RetrievalFault, Scored, SearchRequest, SearchResult

GREP_STRETCH = 128
"""Chunks that grep looks at between two turns of the event loop."""

ENGINE_ERRORS = (OSError, ValueError, IndexError, MemoryError)
"""What reading a damaged or vanished index may raise."""


class EmbeddedRetriever:
    """`Retriever` over an opened index."""

    def __init__(self, index: EmbeddedIndex) -> None:
        self._index = index

    @property
    def info(self) -> IndexInfo:
        return self._index.info

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        begin = time.monotonic()
        answers: list[SearchResult | RetrievalFault] = []
        for request in requests:
            late = time.monotonic() - begin > request.deadline
            answers.append(RetrievalFault(message="deadline") if late else self._search(request))
            await asyncio.sleep(0)
        return answers

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        compiled = compile_pattern(pattern)
        if isinstance(compiled, BadPattern):
            return compiled
        end = time.monotonic() + deadline
        chunks: list[Chunk] = []
        try:
            for start in range(0, len(self._index), GREP_STRETCH):
                stretch = range(start, min(start + GREP_STRETCH, len(self._index)))
                texts = self._index.contents(stretch)
                found = grep(texts, pattern, limit - len(chunks), end - time.monotonic())
                if not isinstance(found, list):
                    return found
                chunks += [self._index.chunk(start + position) for position in found]
                if len(chunks) >= limit:
                    break
                await asyncio.sleep(0)
        except ENGINE_ERRORS as error:
            return _fault(error)
        return tuple(chunks)

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        try:
            return tuple(map(self._index.chunk, self._index.positions_of(doc_id)))
        except ENGINE_ERRORS as error:
            return _fault(error)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        try:
            return tuple(map(self._index.chunk, self._index.positions(chunk_ids)))
        except ENGINE_ERRORS as error:
            return _fault(error)

    def _search(self, request: SearchRequest) -> SearchResult | RetrievalFault:
        begin = time.perf_counter()
        try:
            found = self._index.bm25.search(request.query, request.k, self._index.positions(request.exclude))
            hits = tuple(Scored(chunk=self._index.chunk(position), score=score) for position, score in found)
        except ENGINE_ERRORS as error:
            return _fault(error)
        return SearchResult(
            hits=hits,
            pre_rerank_ids=tuple(hit.chunk.chunk_id for hit in hits),
            stage_ms={"bm25": (time.perf_counter() - begin) * 1000},
        )


def _fault(error: Exception) -> RetrievalFault:
    return RetrievalFault(message=f"{type(error).__name__}: {error}")
