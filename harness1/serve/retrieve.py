"""A retriever as a service: requests in, replies out, without a socket in sight (`harness1.serve.server` has those).

`POST /search`, `/grep`, `/read`, `/get` and `GET /info` are the `Retriever` protocol as JSON; `POST /retrieve` is the
route of Search-R1 (https://github.com/PeterGriffinJin/Search-R1, `search_r1/search/retrieval_server.py`), which the
trainers of several projects call. Work is bounded: so many calls at a time, so many in line, the rest are told to
come again. Nothing that fails is ever answered with an empty list.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import msgspec

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
from harness1.serve.server import answering, lift_file_limit, until_ended
from harness1.serve.service import RETRY_AFTER, Gate, ReadBody, Refused, Reply, ServiceLimits

TOPK = 3
"""Passages for each query of Search-R1 that does not say how many; its own server has the same default."""
GRACE_S = 1.0
"""Beyond its deadline, how long an engine may take to say that it is late."""

Call = TypeVar("Call")
Found = TypeVar("Found")


class RetrievalService:
    """Answers the calls of all connections over one retriever, concurrently, so that it can gather them."""

    def __init__(self, retriever: Retriever, config: Config, limits: ServiceLimits | None = None) -> None:
        self.limits = limits or ServiceLimits()
        self._retriever, self._ranking, self._run = retriever, config.env.retrieval, config.machine
        self._gate = Gate(self.limits)
        about = msgspec.json.encode(About(retriever.info, self._ranking))
        self._fixed = {"/info": about, "/health": b'{"status":"ok"}'}
        self._posts: dict[str, Callable[[bytes, float], Awaitable[Record]]] = {
            "/retrieve": self._retrieve,
            "/search": self._search,
            "/grep": self._grep,
            "/read": self._read,
            "/get": self._get,
        }

    async def answer(self, method: str, path: str, read: ReadBody) -> Reply:
        """Carry out one request.

        Args:
            read: gives the body; called when it is this request's turn, so that bodies in line take no memory. It may
                raise `Refused`.
        """
        arrived = time.monotonic()
        try:
            if path in self._fixed:
                _allow("GET", method, path)
                return Reply(200, self._fixed[path])
            if path not in self._posts:
                raise Refused(404, f"there is no {path} here, but {', '.join([*self._posts, *self._fixed])}")
            _allow("POST", method, path)
            async with self._gate:
                made = await self._posts[path](await read(), time.monotonic() - arrived)
            return Reply(200, msgspec.json.encode(made))
        except Refused as refused:
            return refused.reply

    async def _retrieve(self, body: bytes, waited: float) -> RetrieveAnswer:
        """Search-R1's own answer, also to no query at all: its trainer asks that when nobody in a batch searches."""
        call = _decoded(body, RetrieveCall)
        k = call.topk or TOPK
        requests = [SearchRequest(query, k, deadline=self._run.call_deadline_s - waited) for query in call.queries]
        passages = []
        for found in await self._searched(requests):
            if isinstance(found, RetrievalFault):
                raise Refused(503, found.message, RETRY_AFTER)
            passages.append(_passages(found, call.return_scores))
        return RetrieveAnswer(tuple(passages))

    async def _search(self, body: bytes, waited: float) -> SearchAnswers:
        call = _decoded(body, SearchCall)
        self._expect(call.index_hash, call.retrieval)
        latest = self.limits.deadline_s
        requests = [
            SearchRequest(asked.query, asked.k, asked.exclude, min(asked.deadline, latest) - waited)
            for asked in call.requests
        ]
        return SearchAnswers(tuple(_search_answer(found) for found in await self._searched(requests)))

    async def _grep(self, body: bytes, waited: float) -> ChunksAnswer:
        call = _decoded(body, GrepCall)
        self._expect(call.index_hash)
        self._bound(call.limit, self.limits.hits, "hits")
        deadline = min(call.deadline, self.limits.deadline_s) - waited
        found = await _in_time(self._retriever.grep(call.pattern, call.limit, deadline), deadline)
        return _chunks_answer(found)

    async def _read(self, body: bytes, waited: float) -> ChunksAnswer:
        call = _decoded(body, ReadCall)
        self._expect(call.index_hash)
        found = await _in_time(self._retriever.read(call.doc_id), self._run.call_deadline_s - waited)
        return _chunks_answer(found)

    async def _get(self, body: bytes, waited: float) -> ChunksAnswer:
        call = _decoded(body, GetCall)
        self._expect(call.index_hash)
        self._bound(len(call.chunk_ids), self.limits.hits, "chunks")
        found = await _in_time(self._retriever.get(call.chunk_ids), self._run.call_deadline_s - waited)
        return _chunks_answer(found)

    async def _searched(self, requests: list[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        self._bound(len(requests), self.limits.queries, "queries")
        self._bound(sum(request.k for request in requests), self.limits.hits, "hits")
        if not requests:
            return []
        latest = max(request.deadline for request in requests)
        found = await _in_time(self._retriever.search(requests), latest)
        return [found] * len(requests) if isinstance(found, RetrievalFault) else found

    def _bound(self, asked: int, most: int, what: str) -> None:
        if asked > most:
            raise Refused(400, f"{asked} {what} in one call; at most {most} are answered")

    def _expect(self, index_hash: str | None, ranking: Retrieval | None = None) -> None:
        """Refuse a client that counts on another index or on other ranking settings."""
        mine = self._retriever.info.index_hash
        if index_hash is not None and index_hash != mine:
            raise Refused(409, f"the index served here is {mine[:12]}, not {index_hash[:12]}")
        if ranking is not None and ranking != self._ranking:
            raise Refused(409, f"this server ranks by {msgspec.json.encode(self._ranking).decode()} (env.retrieval)")


def _allow(wanted: str, method: str, path: str) -> None:
    if method != wanted:
        raise Refused(405, f"{path} takes {wanted}, not {method}", {"Allow": wanted})


def _decoded(body: bytes, kind: type[Call]) -> Call:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"not a {kind.__name__}: {error}") from error


async def _in_time(asked: Awaitable[Found], deadline: float) -> Found | RetrievalFault:
    """What an engine answers; engines keep deadlines themselves, and this keeps them for one that does not."""
    try:
        async with asyncio.timeout(max(deadline, 0.0) + GRACE_S):
            return await asked
    except TimeoutError:
        return RetrievalFault("deadline")


def _passages(found: SearchResult, scores: bool) -> tuple[ScoredPassage | Passage, ...]:
    passages = [Passage(hit.chunk.chunk_id, _contents(hit.chunk)) for hit in found.hits]
    if not scores:
        return tuple(passages)
    return tuple(ScoredPassage(passage, hit.score) for passage, hit in zip(passages, found.hits, strict=True))


def _contents(chunk: Chunk) -> str:
    """Title and text as Search-R1's clients take them apart: the title is the first line."""
    return f"{' '.join(chunk.title.split())}\n{chunk.text}"


def _search_answer(found: SearchResult | RetrievalFault) -> SearchAnswer:
    if isinstance(found, RetrievalFault):
        return SearchAnswer(fault=found.message)
    return SearchAnswer(result=found)


def _chunks_answer(found: tuple[Chunk, ...] | BadPattern | RetrievalFault) -> ChunksAnswer:
    match found:
        case RetrievalFault(message=message):
            return ChunksAnswer(fault=message)
        case BadPattern(reason=reason):
            return ChunksAnswer(bad_pattern=reason)
        case chunks:
            return ChunksAnswer(chunks=chunks)


async def serve(
    retriever: Retriever, config: Config, host: str, port: int, on_ready: Callable[[int], None] = lambda _: None
) -> None:
    """Serve a retriever until SIGTERM, or until cancelled (Ctrl-C under `asyncio.run`), with all files that the system
    lets this process open.

    Args:
        port: 0 lets the system choose one.
        on_ready: called with the port once connections are accepted.

    Raises:
        MissingExtra: aiohttp is not installed.
        UsageError: nothing can listen there.
    """
    lift_file_limit()
    await until_ended(listening(RetrievalService(retriever, config), host, port), on_ready)


def listening(service: RetrievalService, host: str, port: int) -> AbstractAsyncContextManager[int]:
    """As `answering`, for a retriever."""
    return answering(lambda asked: service.answer(asked.method, asked.path, asked.read), service.limits, host, port)
