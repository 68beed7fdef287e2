"""Retrieval over HTTP: the messages, our own server (`harness1 serve retrieve`), and any with Search-R1's `/retrieve`.

Every native call may name the index and the ranking settings that the client counts on; a server that has others
refuses it (409). The protocol of Search-R1 has only queries and passages: documents of one chunk, whose id is the
server's or a hash of the contents. There `index_hash` identifies the protocol, `read` and `get` return passages from
earlier searches (an unknown or forgotten one is a fault), and there is no grep."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from harness1.config import Config, Machine, Retrieval
from harness1.config.settings import Count, differences, present
from harness1.errors import MALFORMED, ConfigError, InfrastructureFault
from harness1.http.client import HttpClient, HttpFault, Transient, bearer, is_address, retry
from harness1.plain import digest, text_digest, utf8_safe, without_password
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.protocol import (
    BadPattern,
    Found,
    IndexInfo,
    RetrievalFault,
    Retriever,
    Scored,
    SearchRequest,
    SearchResult,
    total_order,
)

GRACE_S = 2.0
"""Extra time for an answer to arrive after a deadline, which the server enforces."""
LATEST_S = 86_400.0
ASTRAY = "the server returns what was not asked for"
KNOWN = 50_000
"""Passages of Search-R1 kept for `read` and `get`, least recently used dropped: about 50 MB at a hundred words each."""
NOT_PASSAGES = (msgspec.ValidationError, TypeError, ValueError, OverflowError)

T = TypeVar("T")


class About(Record):
    """`GET /info`: the index that is served, and how it ranks."""

    index: IndexInfo
    retrieval: dict[str, Any]
    """`env.retrieval` as the server's version has it."""


class Failure(Record):
    """The body of every answer with a status of 400 and above."""

    error: str


def ranking_of(told: Mapping[str, Any]) -> Retrieval:
    """Return ranking settings as this version has them. Raises ConfigError: of removed ones, not the last default."""
    return msgspec.convert(present(told, "env.retrieval."), Retrieval)


class SearchCall(Record, kw_only=True):
    """`POST /search`; the deadlines count from the moment the call arrives."""

    requests: Annotated[tuple[SearchRequest, ...], Meta(min_length=1)]
    retrieval: dict[str, Any] | None = None
    """`About.retrieval` as the server told it."""
    index_hash: str | None = None


class Answer(Record):
    """The answer to a query, which is a result or a fault, or to grep, read and get: exactly one field is set."""

    result: SearchResult | None = None
    chunks: tuple[Chunk, ...] | None = None
    bad_pattern: str | None = None
    fault: str | None = None


class SearchAnswers(Record):
    """One answer for each query of a `SearchCall`, in its order."""

    answers: tuple[Answer, ...]


class GrepCall(Record, kw_only=True):
    """`POST /grep`."""

    pattern: str
    limit: Count
    deadline: float = 30.0
    index_hash: str | None = None


class ReadCall(Record, kw_only=True):
    """`POST /read`."""

    doc_id: DocId
    index_hash: str | None = None


class GetCall(Record, kw_only=True):
    """`POST /get`."""

    chunk_ids: tuple[ChunkId, ...]
    index_hash: str | None = None


class RetrieveCall(Record):
    """`POST /retrieve` of Search-R1; a `topk` of null or 0 means the server's default."""

    queries: tuple[str, ...]
    topk: Count | None = None
    return_scores: bool = False


class Passage(Record):
    """A document in the format of Search-R1: the first line of `contents` is the title."""

    id: str
    contents: str


class ScoredPassage(Record):
    """A passage of an answer to `return_scores`."""

    document: Passage
    score: float


class RetrieveAnswer(Record):
    """The passages of each query, best first, with scores if they were asked for."""

    result: tuple[tuple[ScoredPassage | Passage, ...], ...]


class SearchR1Retriever:
    """A `Retriever` over `/retrieve` at a base URL. Raises ConfigError: `env.grep` is on; MissingExtra."""

    def __init__(self, url: str, config: Config) -> None:
        if config.env.has("grep"):
            raise ConfigError(f"{url} uses the protocol of Search-R1, which has no grep: --set env.grep.on=false")
        unit = config.index.unit
        self.info = IndexInfo(digest(["search-r1", unit]), unit, 0, 0)
        self._client = HttpClient(url, bearer(config.machine.token_file))
        self._known: OrderedDict[ChunkId, Chunk] = OrderedDict()

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        """Search for all queries in one call, with extra passages in place of excluded ones, which are dropped here."""
        if not requests:
            return []
        begin = time.monotonic()
        topk = max(max(request.k, 1) + len(request.exclude) for request in requests)
        queries = tuple(utf8_safe(request.query) for request in requests)
        body = msgspec.json.encode(RetrieveCall(queries, topk, True))
        latest = max(request.deadline for request in requests)
        answer = await self._client.ask("/retrieve", body, _Passages, max(latest, 0.0))
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

    def _result(self, request: SearchRequest, passages: list[dict[str, Any]], spent: float) -> Found:
        chunks: dict[ChunkId, Scored] = {}
        try:
            for rank, passage in enumerate(passages):
                document, score = msgspec.convert(passage.get("document", passage), _Document), passage.get("score")
                text = document.contents
                title, _, text = text.partition("\n") if "\n" in text else ("", "", text)
                name = ChunkId(text_digest(document.contents) if document.id is None else str(document.id))
                value = 1.0 / (rank + 1) if score is None else float(score)  # higher is better
                if not math.isfinite(value):
                    raise ValueError(f"a score of {score!r}")
                if name not in request.exclude:
                    chunk = Chunk(name, DocId(name), 0, title.strip().strip('"'), text)
                    chunks.setdefault(name, Scored(chunk, value))
        except NOT_PASSAGES as error:
            return RetrievalFault(f"not a passage of Search-R1: {error}")
        order = total_order(((name, scored.score) for name, scored in chunks.items()), max(request.k, 0))
        for name, _ in order:
            self._known[name] = chunks[name].chunk
            self._known.move_to_end(name)
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return SearchResult(tuple(chunks[name] for name, _ in order), stage_ms={"remote": spent * 1000})


class _Passages(msgspec.Struct):
    result: list[list[dict[str, Any]]]


class _Document(msgspec.Struct):
    """The fields of a document that are read; servers add others."""

    contents: str
    id: str | int | None = None


class RemoteRetriever:
    """A `Retriever` over the native routes of a server; `about` is the server's description."""

    def __init__(self, url: str, about: About, machine: Machine) -> None:
        self._client = HttpClient(url, bearer(machine.token_file))
        self.info, self._ranking, self._run = about.index, about.retrieval, machine

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        if not requests:
            return []
        queries = tuple(  # invalid Unicode is in no text, so replacing it changes no result
            SearchRequest(
                utf8_safe(asked.query),
                max(asked.k, 0),
                frozenset(filter(_is_unicode, asked.exclude)),
                min(asked.deadline, LATEST_S),
                utf8_safe(asked.about),
            )
            for asked in requests
        )
        call = SearchCall(requests=queries, retrieval=self._ranking, index_hash=self.info.index_hash)
        found = await self._post("/search", call, SearchAnswers, max(query.deadline for query in queries))
        if isinstance(found, SearchAnswers) and len(found.answers) != len(requests):
            found = RetrievalFault(f"{len(found.answers)} answers to {len(requests)} queries")
        if isinstance(found, RetrievalFault):
            return [found] * len(requests)
        return [_search_answer(query, answer) for query, answer in zip(queries, found.answers, strict=True)]

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        if not _is_unicode(pattern):
            return BadPattern("not valid Unicode")
        deadline = min(deadline, LATEST_S)
        call = GrepCall(pattern=pattern, limit=limit, deadline=deadline, index_hash=self.info.index_hash)
        found = await self._post("/grep", call, Answer, deadline)
        if isinstance(found, Answer) and found.bad_pattern is not None:
            return BadPattern(found.bad_pattern)
        return _chunks(found, lambda chunks: len(chunks) <= max(limit, 0))

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        if not _is_unicode(doc_id):
            return ()
        call = ReadCall(doc_id=doc_id, index_hash=self.info.index_hash)
        found = await self._post("/read", call, Answer, self._run.call_deadline_s)
        return _chunks(found, lambda chunks: all(chunk.doc_id == doc_id for chunk in chunks))

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        ids = tuple(chunk_id for chunk_id in chunk_ids if _is_unicode(chunk_id))
        call = GetCall(chunk_ids=ids, index_hash=self.info.index_hash)
        found = await self._post("/get", call, Answer, self._run.call_deadline_s)
        return _chunks(found, lambda chunks: len(chunks) <= len(ids) and {each.chunk_id for each in chunks} <= {*ids})

    async def _post(self, path: str, call: Record, kind: type[T], deadline: float) -> T | RetrievalFault:
        found = await self._client.ask(path, msgspec.json.encode(call), kind, max(deadline, 0.0) + GRACE_S)
        return RetrievalFault(found.message) if isinstance(found, HttpFault) else found


def _is_unicode(name: str) -> bool:
    """Return True if a name is valid Unicode. Policies can emit lone surrogates, which cannot be sent or stored."""
    return utf8_safe(name) == name


def open_http(url: str, config: Config) -> Retriever:
    """Open the retriever at a URL: one of ours if it has `/info`, else one with Search-R1's `/retrieve`. Raises
    InfrastructureFault; ConfigError: it ranks with other settings, or the URL has a password."""
    if url != (shown := without_password(url)):
        raise ConfigError(f"{shown}: leave out user name, password and parameters, which a retriever cannot be sent")
    base = url.rstrip("/").removesuffix("/retrieve").rstrip("/")
    if not is_address(base):
        raise ConfigError(f"{base} is not the address of a retriever: give http://HOST:PORT")
    with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop
        about = thread.submit(asyncio.run, ask_about(base, config.machine)).result()
    if about is None:
        return SearchR1Retriever(base, config)
    try:
        mine, theirs = (msgspec.to_builtins(each) for each in (config.env.retrieval, ranking_of(about.retrieval)))
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"{base} ranks with settings that this version lacks: {error}") from error
    if wrong := list(differences(mine, theirs, "env.retrieval.")):
        values = {name: msgspec.json.encode(value).decode().strip('"') for name, _, value in wrong}
        options = " ".join(f"--set {name}={value}" for name, value in values.items())
        raise ConfigError(f"{base} ranks with other settings than yours; to use them: {options}")
    return RemoteRetriever(base, about, config.machine)


async def ask_about(base: str, machine: Machine) -> About | None:
    """Return a server's `/info`, None if it has none. Raises InfrastructureFault: it describes something else."""
    client = HttpClient(base, bearer(machine.token_file))

    async def once() -> msgspec.Raw | None:
        page = await client.ask("/info", None, msgspec.Raw, machine.call_deadline_s)
        if not isinstance(page, HttpFault):
            return page
        if page.status in (200, 404, 405):
            return None
        raise Transient(f"no retriever answers at {page.message}")

    page = await retry(once, machine.attempts)
    try:
        return msgspec.json.decode(page, type=About) if page else None
    except MALFORMED as error:
        raise InfrastructureFault(f"{base}/info does not describe an index of harness1: {error}") from error


def _search_answer(query: SearchRequest, answer: Answer) -> Found:
    if answer.result is None:
        return RetrievalFault(answer.fault or "neither a result nor a fault")
    found = [hit.chunk.chunk_id for hit in answer.result.hits]
    if not len(set(found)) == len(found) <= query.k or not query.exclude.isdisjoint(found):
        return RetrievalFault(ASTRAY)
    return answer.result


def _chunks(
    answer: Answer | RetrievalFault, asked_for: Callable[[tuple[Chunk, ...]], bool]
) -> tuple[Chunk, ...] | RetrievalFault:
    if isinstance(answer, RetrievalFault):
        return answer
    if answer.chunks is None:
        return RetrievalFault(answer.fault or "neither chunks nor a fault")
    return answer.chunks if asked_for(answer.chunks) else RetrievalFault(ASTRAY)
