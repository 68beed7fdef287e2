"""The protocol between the environment and whatever finds text (design section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness1.records import Chunk, ChunkId, DocId, Record, Unit


class SearchRequest(Record):
    """One query. Chunks in `exclude` never come back; `deadline` is in seconds from now."""

    query: str
    k: int
    exclude: frozenset[ChunkId] = frozenset()
    deadline: float = 30.0


class Scored(Record):
    """A chunk with the engine's score of it; higher is better."""

    chunk: Chunk
    score: float


class SearchResult(Record):
    """What one query found, best first: ordered by score rounded to 1e-4 of the top score, then by chunk id."""

    hits: tuple[Scored, ...] = ()
    pre_rerank_ids: tuple[ChunkId, ...] = ()
    """What a reranker was given, in the order before; empty without one."""
    stage_ms: dict[str, float] = {}
    """Milliseconds of each stage, of the whole batch that the request was answered in."""


class RetrievalFault(Record):
    """The engine failed. It is a value, so that the other queries of a batch keep their results."""

    message: str


class BadPattern(Record):
    """The regular expression is the policy's mistake; `reason` says what is wrong with it."""

    reason: str


class IndexInfo(Record):
    """What an index is, without opening its data."""

    index_hash: str
    unit: Unit
    documents: int
    chunks: int


class Retriever(Protocol):
    """Search, grep and read over one corpus. Implementations are safe to share between concurrent episodes."""

    @property
    def info(self) -> IndexInfo: ...

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        """Answer each request in order; a failing request does not fail the others."""
        ...

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        """The first `limit` chunks, in corpus order, whose text matches an RE2 pattern."""
        ...

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        """All chunks of a document in order; empty if the corpus has no such document."""
        ...

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        """The named chunks, in the order asked; ids that the corpus does not have are left out."""
        ...
