"""Retrievers of one's own, by `FILE.py:NAME`: a function of a query, or a class with the methods of `Retriever`."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness1.config import Config
from harness1.errors import ConfigError, UsageError
from harness1.hashing import digest
from harness1.plugins import identity, load_own
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.protocol import IndexInfo, RetrievalFault, Retriever, Scored, SearchRequest, SearchResult

_NO_GREP = "a function has no regular expressions: --set env.grep.on=false"


def open_own(name: str, config: Config) -> Retriever:
    """Open what `FILE.py:NAME` names. A class is made without arguments, and has the methods of `Retriever`; a function
    takes a query and a number, and returns that many documents at most, the best first, as mappings with an `id`, a
    `text`, and perhaps a `title` and a `score`.

    Raises:
        UsageError: it is neither.
        ConfigError: it is a function, and `env.grep.on` is set.
    """
    found = load_own(name)
    if inspect.isclass(found):
        retriever: Any = found()
        if lacking := [each for each in ("info", "search", "grep", "read", "get") if not hasattr(retriever, each)]:
            raise UsageError(f"{name} is no retriever: it lacks {', '.join(lacking)}")
        made: Retriever = retriever
        return made
    if not callable(found):
        raise UsageError(f"{name} is no retriever: give a function of a query and a number, or a class")
    if config.env.grep.on:
        raise ConfigError(_NO_GREP)
    return FunctionRetriever(found, digest(["own retriever", identity(name)]))


class FunctionRetriever:
    """Searches by a function. A document is one chunk; those that were found can be read."""

    def __init__(self, function: Callable[[str, int], Any], index_hash: str) -> None:
        self.info = IndexInfo(index_hash, "document", 0, 0)
        self._function = function
        self._known: dict[DocId, Chunk] = {}

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        return [await self._search(request) for request in requests]

    async def grep(self, pattern: str, limit: int, deadline: float) -> RetrievalFault:
        return RetrievalFault(_NO_GREP)

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...]:
        return (self._known[doc_id],) if doc_id in self._known else ()

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...]:
        return tuple(self._known[DocId(each)] for each in chunk_ids if DocId(each) in self._known)

    async def _search(self, request: SearchRequest) -> SearchResult:
        wanted = request.k + len(request.exclude)
        if inspect.iscoroutinefunction(self._function):
            found = await self._function(request.query, wanted)
        else:
            found = await asyncio.to_thread(self._function, request.query, wanted)
        hits = [hit for hit in self._scored(found) if hit.chunk.chunk_id not in request.exclude]
        return SearchResult(tuple(hits[: request.k]))

    def _scored(self, found: Iterable[Any]) -> list[Scored]:
        hits: dict[DocId, Scored] = {}
        for rank, row in enumerate(found):
            if not isinstance(row, dict) or not isinstance(row.get("text"), str) or "id" not in row:
                raise TypeError(f"a retriever returns mappings with an id and a text, not {row!r:.100}")
            doc_id, score = DocId(str(row["id"])), float(row.get("score", -rank))
            if not math.isfinite(score):
                raise ValueError(f"a score is a finite number, not {score} (of {doc_id!r})")
            chunk = Chunk(ChunkId(doc_id), doc_id, 0, str(row.get("title") or ""), row["text"])
            self._known[doc_id] = chunk
            hits.setdefault(doc_id, Scored(chunk, score))
        return list(hits.values())
