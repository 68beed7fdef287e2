"""Serve a retriever, as an application without sockets (`harness1.serve.server` runs it): the `Retriever` protocol as
JSON, and Search-R1's `POST /retrieve` (https://github.com/PeterGriffinJin/Search-R1,
`search_r1/search/retrieval_server.py`). A failure is never answered with an empty list."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from harness1.config import Config
from harness1.errors import ConfigError
from harness1.records import Chunk, Record
from harness1.retrieval.engines import remote
from harness1.retrieval.protocol import BadPattern, RetrievalFault, Retriever, SearchRequest, SearchResult
from harness1.serve import service

TOPK = 3  # default number of passages for a query of Search-R1, as in its own server
GRACE_S = 1.0  # extra time for an engine to report that it missed its deadline

Call = TypeVar("Call")
Found = TypeVar("Found")


class RetrievalService:
    """Answer calls concurrently over one retriever, which can batch them."""

    def __init__(
        self,
        retriever: Retriever,
        config: Config,
        limits: service.ServiceLimits | None = None,
        access: service.Access | None = None,
    ) -> None:
        self.limits = limits or service.ServiceLimits()
        self._retriever, self._ranking = retriever, config.env.retrieval
        self._deadline_s = config.machine.call_deadline_s
        self._gate, self._bodies = service.Gate(self.limits), service.Bodies(self.limits)
        posts = {
            "/retrieve": self._turn(remote.RetrieveCall, self._retrieve),
            "/search": self._turn(remote.SearchCall, self._search),
            "/grep": self._turn(remote.GrepCall, self._grep),
            "/read": self._turn(remote.ReadCall, self._read),
            "/get": self._turn(remote.GetCall, self._get),
        }
        self.app = service.application(posts, {"/info": self._info}, admit=(access or service.Access()).check)

    def _turn(self, kind: type[Call], answer: Callable[[Call, float], Awaitable[Record]]) -> service.Endpoint:
        """Return an endpoint behind a gate; `answer` gets the time since a call arrived, in seconds."""

        async def endpoint(request: Request) -> service.Json:
            arrived = time.monotonic()
            async with self._bodies.read(request) as body:
                call = _decode(body, kind)
                async with self._gate:
                    return service.Json(await answer(call, time.monotonic() - arrived))

        return endpoint

    async def _info(self, request: Request) -> service.Json:
        return service.Json(remote.About(self._retriever.info, msgspec.to_builtins(self._ranking)))

    async def _retrieve(self, call: remote.RetrieveCall, waited: float) -> remote.RetrieveAnswer:
        """Answer as Search-R1 does, also without queries, which its trainer sends if no sample of a batch searches."""
        k = call.topk or TOPK
        requests = [SearchRequest(query, k, deadline=self._deadline_s - waited) for query in call.queries]
        answers = []
        for found in await self._search_all(requests):
            if isinstance(found, RetrievalFault):
                raise service.Refused(503, found.message, service.RETRY_AFTER)
            passages: list[remote.ScoredPassage | remote.Passage] = []
            for chunk, score in ((hit.chunk, hit.score) for hit in found.hits):
                # Search-R1's clients take the first line for the title.
                passage = remote.Passage(chunk.chunk_id, f"{' '.join(chunk.title.split())}\n{chunk.text}")
                passages.append(remote.ScoredPassage(passage, score) if call.return_scores else passage)
            answers.append(tuple(passages))
        return remote.RetrieveAnswer(tuple(answers))

    async def _search(self, call: remote.SearchCall, waited: float) -> remote.SearchAnswers:
        self._expect(call.index_hash, call.retrieval)
        _bound(sum(len(asked.exclude) for asked in call.requests), self.limits.excluded, "excluded chunks")
        self._bound_ids(chunk_id for asked in call.requests for chunk_id in asked.exclude)
        latest = self.limits.deadline_s
        requests = [
            msgspec.structs.replace(asked, deadline=min(asked.deadline, latest) - waited) for asked in call.requests
        ]
        answers = [
            remote.Answer(fault=found.message) if isinstance(found, RetrievalFault) else remote.Answer(result=found)
            for found in await self._search_all(requests)
        ]
        return remote.SearchAnswers(tuple(answers))

    async def _grep(self, call: remote.GrepCall, waited: float) -> remote.Answer:
        self._expect(call.index_hash)
        _bound(call.limit, self.limits.hits, "hits")
        _bound(len(call.pattern), self.limits.query_characters, "characters of a pattern")
        deadline = min(call.deadline, self.limits.deadline_s) - waited
        return await _chunks(self._retriever.grep(call.pattern, call.limit, deadline), deadline)

    async def _read(self, call: remote.ReadCall, waited: float) -> remote.Answer:
        self._expect(call.index_hash)
        self._bound_ids([call.doc_id])
        return await _chunks(self._retriever.read(call.doc_id), self._deadline_s - waited)

    async def _get(self, call: remote.GetCall, waited: float) -> remote.Answer:
        self._expect(call.index_hash)
        _bound(len(call.chunk_ids), self.limits.hits, "chunks")
        self._bound_ids(call.chunk_ids)
        return await _chunks(self._retriever.get(call.chunk_ids), self._deadline_s - waited)

    async def _search_all(self, requests: list[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        _bound(len(requests), self.limits.queries, "queries")
        _bound(sum(request.k for request in requests), self.limits.hits, "hits")
        longest = max((len(text) for asked in requests for text in (asked.query, asked.about)), default=0)
        _bound(longest, self.limits.query_characters, "characters of a query or its comparison")
        if not requests:
            return []
        latest = max(request.deadline for request in requests)
        found = await _wait_for(self._retriever.search(requests), latest)
        return [found] * len(requests) if isinstance(found, RetrievalFault) else found

    def _bound_ids(self, ids: Iterable[str]) -> None:
        _bound(max(map(len, ids), default=0), self.limits.id_characters, "characters of an id")

    def _expect(self, index_hash: str | None, ranking: dict[str, Any] | None = None) -> None:
        mine = self._retriever.info.index_hash
        if index_hash is not None and index_hash != mine:
            raise service.Refused(409, f"the index served here is {mine[:12]}, not {index_hash[:12]}")
        try:
            is_mine = ranking is None or remote.ranking_of(ranking) == self._ranking
        except msgspec.ValidationError as error:
            raise service.Refused(400, f"not ranking settings: {error}") from error
        except ConfigError:  # of a setting that was removed
            is_mine = False
        if not is_mine:
            raise service.Refused(
                409, f"this server ranks by {msgspec.json.encode(self._ranking).decode()} (env.retrieval)"
            )


def _bound(asked: int, most: int, what: str) -> None:
    if asked > most:
        raise service.Refused(400, f"{asked} {what} in one call; at most {most} are answered")


def _decode(body: bytes, kind: type[Call]) -> Call:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise service.Refused(400, f"not a {kind.__name__}: {error}") from error


async def _wait_for(asked: Awaitable[Found], deadline: float) -> Found | RetrievalFault:
    try:
        async with asyncio.timeout(max(deadline, 0.0) + GRACE_S):
            return await asked
    except TimeoutError:
        return RetrievalFault("deadline")


async def _chunks(asked: Awaitable[tuple[Chunk, ...] | BadPattern | RetrievalFault], deadline: float) -> remote.Answer:
    match await _wait_for(asked, deadline):
        case RetrievalFault(message=message):
            return remote.Answer(fault=message)
        case BadPattern(reason=reason):
            return remote.Answer(bad_pattern=reason)
        case chunks:
            return remote.Answer(chunks=chunks)
