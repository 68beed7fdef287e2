"""The protocol between the environment and retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness1.config.settings import Count
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
    """The chunks that one query found, best first: ordered by score rounded to 1e-4 of the top score, then by chunk
    id."""

    hits: tuple[Scored, ...] = ()
    pre_rerank_ids: tuple[ChunkId, ...] = ()
    """The chunks that a reranker was given, in their earlier order; empty without one."""
    stage_ms: dict[str, float] = {}
    """Milliseconds of each stage, for the whole batch that answered the request."""


class RetrievalFault(Record):
    """The failure of an engine. It is a value, so that the other queries of a batch keep their results."""

    message: str


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
    """What the analyser was made for: a language, `auto` (by script) or `none`; empty: English, in Latin script."""


class Retriever(Protocol):
    """Search, grep and read over one corpus. Implementations are safe to share between concurrent episodes."""

    @property
    def info(self) -> IndexInfo: ...

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        """Answer each request in order; a failing request does not fail the others."""
        ...

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        """Return the first `limit` chunks, in corpus order, whose text matches an RE2 pattern."""
        ...

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        """Return all chunks of a document in order; none if the corpus lacks it."""
        ...

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        """Return the named chunks, in the order asked; ids that the corpus lacks are left out."""
        ...
