"""Serve a retriever, as an application without sockets (`harness1.serve.server` runs it).

`POST /search`, `/grep`, `/read`, `/get` and `GET /info` are the `Retriever` protocol as JSON; `POST /retrieve` is the
route of Search-R1 (https://github.com/PeterGriffinJin/Search-R1, `search_r1/search/retrieval_server.py`), which the
trainers of several projects call. The numbers of running and waiting calls are bounded; further calls are refused. A
failure is never answered with an empty list.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request

from harness1.config import Config, Retrieval
from harness1.records import Chunk, Record
from harness1.retrieval.protocol import BadPattern, RetrievalFault, Retriever, SearchRequest, SearchResult
from harness1.retrieval.wire import (
    About,
    ChunksAnswer,
    GetCall,
    GrepCall,
    Passage,
    ReadCall,
    RetrieveAnswer,
    RetrieveCall,
    ScoredPassage,
    SearchAnswer,
    SearchAnswers,
    SearchCall,
)
from harness1.serve.service import RETRY_AFTER, Endpoint, Gate, Json, Refused, ServiceLimits, application, read_body

TOPK = 3
"""Default number of passages for a query of Search-R1, as in its own server."""
GRACE_S = 1.0
"""Extra time for an engine to report that it missed its deadline."""

Call = TypeVar("Call")
Found = TypeVar("Found")


class RetrievalService:
    """Answer calls concurrently over one retriever, which can batch them."""

    def __init__(self, retriever: Retriever, config: Config, limits: ServiceLimits | None = None) -> None:
        self.limits = limits or ServiceLimits()
        self._retriever, self._ranking = retriever, config.env.retrieval
        self._deadline_s = config.machine.call_deadline_s
        self._gate = Gate(self.limits)
        posts = {
            "/retrieve": self._turn(RetrieveCall, self._retrieve),
            "/search": self._turn(SearchCall, self._search),
            "/grep": self._turn(GrepCall, self._grep),
            "/read": self._turn(ReadCall, self._read),
            "/get": self._turn(GetCall, self._get),
        }
        self.app = application(posts, {"/info": self._info})

    def _turn(self, kind: type[Call], answer: Callable[[Call, float], Awaitable[Record]]) -> Endpoint:
        """Return an endpoint behind the gate; `answer` gets the time that a call waited, in seconds.

        The body is read after the wait, so that waiting calls take no memory.
        """

        async def endpoint(request: Request) -> Json:
            arrived = time.monotonic()
            async with self._gate:
                call = _decoded(await read_body(request, self.limits), kind)
                made = await answer(call, time.monotonic() - arrived)
            return Json(made)

        return endpoint

    async def _info(self, request: Request) -> Json:
        return Json(About(self._retriever.info, self._ranking))

    async def _retrieve(self, call: RetrieveCall, waited: float) -> RetrieveAnswer:
        """Answer as Search-R1 does, also without queries, which its trainer sends if no sample of a batch searches."""
        k = call.topk or TOPK
        requests = [SearchRequest(query, k, deadline=self._deadline_s - waited) for query in call.queries]
        passages = []
        for found in await self._searched(requests):
            if isinstance(found, RetrievalFault):
                raise Refused(503, found.message, RETRY_AFTER)
            passages.append(_passages(found, call.return_scores))
        return RetrieveAnswer(tuple(passages))

    async def _search(self, call: SearchCall, waited: float) -> SearchAnswers:
        self._expect(call.index_hash, call.retrieval)
        latest = self.limits.deadline_s
        requests = [
            SearchRequest(asked.query, asked.k, asked.exclude, min(asked.deadline, latest) - waited)
            for asked in call.requests
        ]
        answers = (
            SearchAnswer(fault=found.message) if isinstance(found, RetrievalFault) else SearchAnswer(result=found)
            for found in await self._searched(requests)
        )
        return SearchAnswers(tuple(answers))

    async def _grep(self, call: GrepCall, waited: float) -> ChunksAnswer:
        self._expect(call.index_hash)
        _bound(call.limit, self.limits.hits, "hits")
        deadline = min(call.deadline, self.limits.deadline_s) - waited
        return await _chunks(self._retriever.grep(call.pattern, call.limit, deadline), deadline)

    async def _read(self, call: ReadCall, waited: float) -> ChunksAnswer:
        self._expect(call.index_hash)
        return await _chunks(self._retriever.read(call.doc_id), self._deadline_s - waited)

    async def _get(self, call: GetCall, waited: float) -> ChunksAnswer:
        self._expect(call.index_hash)
        _bound(len(call.chunk_ids), self.limits.hits, "chunks")
        return await _chunks(self._retriever.get(call.chunk_ids), self._deadline_s - waited)

    async def _searched(self, requests: list[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        _bound(len(requests), self.limits.queries, "queries")
        _bound(sum(request.k for request in requests), self.limits.hits, "hits")
        if not requests:
            return []
        latest = max(request.deadline for request in requests)
        found = await _in_time(self._retriever.search(requests), latest)
        return [found] * len(requests) if isinstance(found, RetrievalFault) else found

    def _expect(self, index_hash: str | None, ranking: Retrieval | None = None) -> None:
        """Refuse a client that expects another index or other ranking settings."""
        mine = self._retriever.info.index_hash
        if index_hash is not None and index_hash != mine:
            raise Refused(409, f"the index served here is {mine[:12]}, not {index_hash[:12]}")
        if ranking is not None and ranking != self._ranking:
            raise Refused(409, f"this server ranks by {msgspec.json.encode(self._ranking).decode()} (env.retrieval)")


def _bound(asked: int, most: int, what: str) -> None:
    if asked > most:
        raise Refused(400, f"{asked} {what} in one call; at most {most} are answered")


def _decoded(body: bytes, kind: type[Call]) -> Call:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"not a {kind.__name__}: {error}") from error


async def _in_time(asked: Awaitable[Found], deadline: float) -> Found | RetrievalFault:
    """Return the answer of an engine, or a fault if it exceeds its deadline."""
    try:
        async with asyncio.timeout(max(deadline, 0.0) + GRACE_S):
            return await asked
    except TimeoutError:
        return RetrievalFault("deadline")


def _passages(found: SearchResult, scores: bool) -> tuple[ScoredPassage | Passage, ...]:
    """Return passages in the form that Search-R1's clients parse: the title is the first line."""
    passages = []
    for chunk, score in ((hit.chunk, hit.score) for hit in found.hits):
        passage = Passage(chunk.chunk_id, f"{' '.join(chunk.title.split())}\n{chunk.text}")
        passages.append(ScoredPassage(passage, score) if scores else passage)
    return tuple(passages)


async def _chunks(asked: Awaitable[tuple[Chunk, ...] | BadPattern | RetrievalFault], deadline: float) -> ChunksAnswer:
    match await _in_time(asked, deadline):
        case RetrievalFault(message=message):
            return ChunksAnswer(fault=message)
        case BadPattern(reason=reason):
            return ChunksAnswer(bad_pattern=reason)
        case chunks:
            return ChunksAnswer(chunks=chunks)
