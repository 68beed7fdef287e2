"""Retrieval from an index that another process serves (`harness1 serve retrieve`), over our native routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from harness1.config import Config, Machine
from harness1.config.settings import Settings, differences
from harness1.errors import MALFORMED, ConfigError, InfrastructureFault
from harness1.http.client import HttpClient, HttpFault, bearer, is_address
from harness1.http.retrying import Transient, retried
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.redaction import without_password
from harness1.retrieval.engines.engine import is_unicode
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, Retriever, SearchRequest, SearchResult
from harness1.retrieval.wire import (
    About,
    ChunksAnswer,
    GetCall,
    GrepCall,
    ReadCall,
    SearchAnswer,
    SearchAnswers,
    SearchCall,
)

GRACE_S = 2.0
"""Extra time for an answer to arrive after a deadline, which the server enforces."""
LATEST_S = 86_400.0
"""Longest deadline that is sent."""

ASTRAY = "the server returns what was not asked for"

Answer = TypeVar("Answer")


class RemoteRetriever:
    """A `Retriever` over the native routes of a server; `about` is the server's description."""

    def __init__(self, url: str, about: About, machine: Machine) -> None:
        self._client = HttpClient(url, bearer(machine.token_file))
        self._about, self._run = about, machine

    @property
    def info(self) -> IndexInfo:
        return self._about.index

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        if not requests:
            return []
        queries = tuple(_query(request) for request in requests)
        call = SearchCall(requests=queries, retrieval=self._about.retrieval, index_hash=self.info.index_hash)
        found = await self._post("/search", call, SearchAnswers, max(query.deadline for query in queries))
        if isinstance(found, SearchAnswers) and len(found.answers) != len(requests):
            found = RetrievalFault(f"{len(found.answers)} answers to {len(requests)} queries")
        if isinstance(found, RetrievalFault):
            return [found] * len(requests)
        return [_search_answer(query, answer) for query, answer in zip(queries, found.answers, strict=True)]

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        if not is_unicode(pattern):
            return BadPattern("not valid Unicode")
        deadline = min(deadline, LATEST_S)
        call = GrepCall(pattern=pattern, limit=limit, deadline=deadline, index_hash=self.info.index_hash)
        found = await self._post("/grep", call, ChunksAnswer, deadline)
        if isinstance(found, ChunksAnswer) and found.bad_pattern is not None:
            return BadPattern(found.bad_pattern)
        return _chunks(found, lambda chunks: len(chunks) <= max(limit, 0))

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        if not is_unicode(doc_id):
            return ()
        call = ReadCall(doc_id=doc_id, index_hash=self.info.index_hash)
        found = await self._post("/read", call, ChunksAnswer, self._run.call_deadline_s)
        return _chunks(found, lambda chunks: all(chunk.doc_id == doc_id for chunk in chunks))

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        ids = tuple(chunk_id for chunk_id in chunk_ids if is_unicode(chunk_id))
        call = GetCall(chunk_ids=ids, index_hash=self.info.index_hash)
        found, asked = await self._post("/get", call, ChunksAnswer, self._run.call_deadline_s), set(ids)
        return _chunks(found, lambda chunks: len(chunks) <= len(ids) and asked.issuperset(map(_id_of, chunks)))

    async def _post(self, path: str, call: Record, kind: type[Answer], deadline: float) -> Answer | RetrievalFault:
        found = await self._client.post(path, msgspec.json.encode(call), kind, max(deadline, 0.0) + GRACE_S)
        return RetrievalFault(found.message) if isinstance(found, HttpFault) else found


def open_http(url: str, config: Config) -> Retriever:
    """Open the retriever at a URL: one of ours if it has `/info`, else one with Search-R1's `/retrieve`.

    Raises:
        InfrastructureFault: the server cannot be reached, or fails.
        ConfigError: our server ranks with other settings, Search-R1's protocol lacks a feature, or the URL contains a
            password.
        MissingExtra: httpx is not installed.
    """
    from harness1.retrieval.engines.search_r1 import SearchR1Retriever

    if url != (shown := without_password(url)):
        raise ConfigError(
            f"{shown}: a user name, a password and parameters cannot be sent to a retriever: leave them out"
        )
    base = url.rstrip("/").removesuffix("/retrieve").rstrip("/")
    if not is_address(base):
        raise ConfigError(f"{base} is not the address of a retriever: give http://HOST:PORT")
    with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop
        about = thread.submit(asyncio.run, ask_about(base, config.machine)).result()
    if about is None:
        return SearchR1Retriever(base, config)
    if wrong := list(_differences(config.env.retrieval, about.retrieval)):
        raise ConfigError(f"{base} ranks with other settings than yours; to use them: {' '.join(wrong)}")
    return RemoteRetriever(base, about, config.machine)


async def ask_about(base: str, machine: Machine) -> About | None:
    """Return a server's `/info`; None if it has no such page, or one that is not JSON. Raise InfrastructureFault if it
    cannot be reached or fails, `machine.attempts` times, or describes something else."""
    client = HttpClient(base, bearer(machine.token_file))

    async def once() -> msgspec.Raw | None:
        page = await client.get("/info", msgspec.Raw, machine.call_deadline_s)
        if not isinstance(page, HttpFault):
            return page
        if page.status in (200, 404, 405):
            return None
        raise Transient(f"no retriever answers at {page.message}")

    page = await retried(once, machine.attempts, machine.backoff_s)
    try:
        return msgspec.json.decode(page, type=About) if page else None
    except MALFORMED as error:
        raise InfrastructureFault(f"{base}/info does not describe an index of harness1: {error}") from error


def _differences(mine: Settings, theirs: Settings) -> Iterator[str]:
    """Yield the options that would make my settings equal to theirs."""
    for name, _, value in differences(msgspec.to_builtins(mine), msgspec.to_builtins(theirs), "env.retrieval."):
        text = msgspec.json.encode(value).decode().strip('"')
        yield f"--set {name}={text}"


def _query(request: SearchRequest) -> SearchRequest:
    """Return a request for the wire. Invalid Unicode is in no text, so replacing it changes no result."""
    query = request.query.encode("utf-8", "replace").decode()
    exclude = frozenset(filter(is_unicode, request.exclude))
    about = request.about.encode("utf-8", "replace").decode()
    return SearchRequest(query, max(request.k, 0), exclude, min(request.deadline, LATEST_S), about)


def _search_answer(query: SearchRequest, answer: SearchAnswer) -> SearchResult | RetrievalFault:
    if answer.result is None:
        return RetrievalFault(answer.fault or "neither a result nor a fault")
    found = [_id_of(hit.chunk) for hit in answer.result.hits]
    if not len(set(found)) == len(found) <= query.k or not query.exclude.isdisjoint(found):
        return RetrievalFault(ASTRAY)
    return answer.result


def _chunks(
    answer: ChunksAnswer | RetrievalFault, asked_for: Callable[[tuple[Chunk, ...]], bool]
) -> tuple[Chunk, ...] | RetrievalFault:
    if isinstance(answer, RetrievalFault):
        return answer
    if answer.chunks is None:
        return RetrievalFault(answer.fault or "neither chunks nor a fault")
    return answer.chunks if asked_for(answer.chunks) else RetrievalFault(ASTRAY)


def _id_of(chunk: Chunk) -> ChunkId:
    return chunk.chunk_id
