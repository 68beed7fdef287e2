"""Retrieval from any server with Search-R1's `POST /retrieve`.

The protocol has only queries and passages:

- a passage is a document of one chunk; its id is the server's, or else a hash of its contents;
- `index_hash` identifies the protocol, not the corpus, and the counts of `IndexInfo` are 0;
- `read` and `get` return passages from earlier searches; an unknown or forgotten one is a fault;
- there is no grep.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from harness1.config import Config
from harness1.errors import ConfigError
from harness1.hashing import digest, text_digest
from harness1.http.client import HttpClient, HttpFault, bearer
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.ordering import total_order
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, Scored, SearchRequest, SearchResult
from harness1.retrieval.wire import RetrieveCall

KNOWN = 50_000
"""Passages kept for `read` and `get`, least recently used dropped: about 50 MB at a hundred words each."""
NOT_PASSAGES = (msgspec.ValidationError, TypeError, ValueError, OverflowError)
"""Errors from reading a malformed answer."""


class SearchR1Retriever:
    """A `Retriever` over `/retrieve` at a base URL.

    Raises:
        ConfigError: `env.grep` is on.
        MissingExtra: httpx is not installed.
    """

    def __init__(self, url: str, config: Config) -> None:
        if config.env.grep.on:
            raise ConfigError(f"{url} uses the protocol of Search-R1, which has no grep: --set env.grep.on=false")
        unit = config.index.unit
        self.info = IndexInfo(digest(["search-r1", unit]), unit, 0, 0)
        self._client = HttpClient(url, bearer(config.machine.token_file))
        self._known: OrderedDict[ChunkId, Chunk] = OrderedDict()

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        """Search for all queries in one call, with extra passages in place of excluded ones, which are dropped here."""
        if not requests:
            return []
        begin = time.monotonic()
        topk = max(max(request.k, 1) + len(request.exclude) for request in requests)
        queries = tuple(request.query.encode("utf-8", "replace").decode() for request in requests)
        body = msgspec.json.encode(RetrieveCall(queries, topk, True))
        latest = max(request.deadline for request in requests)
        answer = await self._client.post("/retrieve", body, _Answer, max(latest, 0.0))
        if isinstance(answer, HttpFault):
            return [RetrievalFault(answer.message)] * len(requests)
        if len(answer.result) != len(requests):
            return [RetrievalFault(f"{len(answer.result)} results for {len(requests)} queries")] * len(requests)
        spent = time.monotonic() - begin
        return [
            RetrievalFault("deadline") if spent > request.deadline else self._result(request, passages, spent)
            for request, passages in zip(requests, answer.result, strict=True)
        ]

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        return RetrievalFault("the protocol of Search-R1 has no grep")

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        return await self.get([ChunkId(doc_id)])

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        for chunk_id in chunk_ids:
            if chunk_id not in self._known:
                return RetrievalFault(f"the text of {chunk_id!r} is not known here, and Search-R1 cannot be asked")
            self._known.move_to_end(chunk_id)
        return tuple(self._known[chunk_id] for chunk_id in chunk_ids)

    def _result(
        self, request: SearchRequest, passages: list[dict[str, Any]], spent: float
    ) -> SearchResult | RetrievalFault:
        try:
            found = [_scored(passage, rank) for rank, passage in enumerate(passages)]
        except NOT_PASSAGES as error:
            return RetrievalFault(f"not a passage of Search-R1: {error}")
        chunks: dict[ChunkId, Scored] = {}
        for scored in found:
            if scored.chunk.chunk_id not in request.exclude:
                chunks.setdefault(scored.chunk.chunk_id, scored)
        order = total_order(((name, scored.score) for name, scored in chunks.items()), max(request.k, 0))
        for name, _ in order:
            self._remember(chunks[name].chunk)
        return SearchResult(tuple(chunks[name] for name, _ in order), stage_ms={"remote": spent * 1000})

    def _remember(self, chunk: Chunk) -> None:
        self._known[chunk.chunk_id] = chunk
        self._known.move_to_end(chunk.chunk_id)
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)


class _Answer(msgspec.Struct):
    result: list[list[dict[str, Any]]]


class _Document(msgspec.Struct):
    """The fields of a document that are read; servers add others."""

    contents: str
    id: str | int | None = None


def _scored(passage: dict[str, Any], rank: int) -> Scored:
    """Return a passage with its score (higher is better), or with one by its rank if it has none."""
    document = msgspec.convert(passage.get("document", passage), _Document)
    score = passage.get("score")
    title, line_end, text = document.contents.partition("\n")
    if not line_end:
        title, text = "", title
    name = text_digest(document.contents) if document.id is None else str(document.id)
    chunk = Chunk(ChunkId(name), DocId(name), 0, title.strip().strip('"'), text)
    value = 1.0 / (rank + 1) if score is None else float(score)
    if not math.isfinite(value):
        raise ValueError(f"a score of {score!r}")
    return Scored(chunk, value)
