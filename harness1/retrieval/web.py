"""The retriever of the web: a search API finds pages, a page reader reads them, a disk cache keeps every answer.

The search API answers as Serper's does: `POST {"q", "num"}` with the key in `X-API-KEY` gives `{"organic": [{"title",
"link", "snippet", "position"}]}`. The reader answers as Jina's does: `GET <its address><address of the page>`, with the
key as bearer, gives the text of the page. Each is asked at its own address alone: a redirect is a fault.

A document is a page under its normalised address. A search finds its snippet, the chunk `ADDRESS#snippet`; reading
gives the page itself, cut as the documents of an index are (`harness1.retrieval.chunking`). Addresses have no
fragment, so no two chunks share an id.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from harness1.config import Config, Web
from harness1.errors import ConfigError, CorpusError, MissingExtra, UsageError
from harness1.hashing import digest
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.chunking import chunk
from harness1.retrieval.corpus import Document
from harness1.retrieval.page_cache import (
    HOST,
    MOST_RESULTS,
    PORTS,
    Page,
    PageCache,
    Question,
    allowed,
    page_question,
    page_url,
    search_question,
    snippet_question,
)
from harness1.retrieval.retriever import IndexInfo, RetrievalFault, Scored, SearchRequest, SearchResult

if TYPE_CHECKING:
    import aiohttp

SNIPPET = "#snippet"
READ_AT_ONCE = 65536

_GONE = (404, 410)
_GONE_BEHIND = re.compile(r"^Warning: Target URL returned error (404|410)\b", re.MULTILINE)
_NO_GREP = "a search API has no regular expressions: --set env.grep.on=false"


def open_web(cache: str, config: Config) -> WebRetriever:
    """The web behind the endpoints of `config.run.web`, with its cache in a folder.

    Raises:
        UsageError: no folder is named.
        ConfigError: a setting of `run.web` is missing or unusable, or `env.grep.on` asks for what no search API does.
        CorpusError: the folder cannot be made, or is to answer offline and is not there.
        MissingExtra: aiohttp is not installed.
    """
    web = config.run.web
    if not cache:
        raise UsageError("the web retriever needs a folder for its cache: --index web:CACHE_FOLDER")
    if config.env.grep.on:
        raise ConfigError(_NO_GREP)
    _check_endpoint("search", web.search_url, web.search_key)
    if config.env.read.on or web.read_url:
        _check_endpoint("read", web.read_url, web.read_key)
    for host in web.hosts:
        if not HOST.fullmatch(host.lower()):
            raise ConfigError(f"run.web.hosts takes names such as en.wikipedia.org, not {host!r}")
    _check_folder(Path(cache), web.offline)
    if not web.offline:
        try:
            import aiohttp  # noqa: F401
        except ImportError as error:
            raise MissingExtra("aiohttp", "serve") from error
    return WebRetriever(PageCache(Path(cache)), config)


class WebRetriever:
    """`Retriever` over a search API and a page reader. Made by `open_web`."""

    info: IndexInfo
    """The hash names how the web is asked, not where. Nobody knows how many pages it has: both counts are 0."""

    def __init__(self, cache: PageCache, config: Config) -> None:
        self._web, self._chunk_tokens, self._cache = config.run.web, config.index.chunk_tokens, cache
        self._client = WebClient(cache, config.run.web)
        hosts = sorted({host.lower() for host in self._web.hosts})
        settings = ["search and read", self._web.results, hosts, self._web.page_bytes, self._chunk_tokens]
        self.info = IndexInfo(index_hash=digest(settings), unit="document", documents=0, chunks=0)

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        return list(await asyncio.gather(*map(self._search, requests)))

    async def grep(self, pattern: str, limit: int, deadline: float) -> RetrievalFault:
        return RetrievalFault(message=_NO_GREP)

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        url = page_url(doc_id)
        if url is None or not allowed(url, self._web.hosts):
            return ()
        if not self._web.read_url:
            return RetrievalFault(message="run.web.read_url is not set")
        pages = await self._client.answer(page_question(url, self._web))
        return pages if isinstance(pages, RetrievalFault) else self._chunks(pages)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...]:
        """Chunks that the cache holds, a snippet as a search first showed it. Nothing is asked of the web."""
        known: dict[Question, dict[ChunkId, Chunk]] = {}
        found = []
        for chunk_id in chunk_ids:
            url = page_url(chunk_id)
            if url is None or not allowed(url, self._web.hosts):
                continue
            is_snippet = chunk_id.endswith(SNIPPET)
            question = snippet_question(url, self._web) if is_snippet else page_question(url, self._web)
            if question not in known:
                pages = self._cache.get(question) or ()
                known[question] = {each.chunk_id: each for each in (_snippets if is_snippet else self._chunks)(pages)}
            found.append(known[question].get(chunk_id))
        return tuple(each for each in found if each is not None)

    async def _search(self, request: SearchRequest) -> SearchResult | RetrievalFault:
        """The snippets of the pages found, in the order of the search API, without those that are excluded."""
        begin = time.perf_counter()
        if request.deadline <= 0:
            return RetrievalFault(message="deadline")
        if not request.query.strip():
            return SearchResult()
        seen = sum(chunk_id.endswith(SNIPPET) for chunk_id in request.exclude)
        try:
            async with asyncio.timeout(request.deadline):
                pages = await self._client.answer(search_question(request.query, seen, self._web))
        except TimeoutError:
            return RetrievalFault(message="deadline")
        if isinstance(pages, RetrievalFault):
            return pages
        hits = [
            Scored(chunk=snippet, score=1 / rank)
            for rank, snippet in enumerate(_snippets(pages), start=1)
            if snippet.chunk_id not in request.exclude and allowed(snippet.doc_id, self._web.hosts)
        ]
        return SearchResult(hits=tuple(hits[: request.k]), stage_ms={"web": (time.perf_counter() - begin) * 1000})

    def _chunks(self, pages: Sequence[Page]) -> tuple[Chunk, ...]:
        documents = (Document(doc_id=DocId(page.url), title=page.title, text=page.text) for page in pages)
        return tuple(piece for document in documents for piece in chunk(document, self._chunk_tokens))


def _snippets(pages: Sequence[Page]) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(chunk_id=ChunkId(page.url + SNIPPET), doc_id=DocId(page.url), index=0, title=page.title, text=page.text)
        for page in pages
    )


class _Line:
    """What requests in flight on one event loop share. It lives no longer than they do."""

    def __init__(self, session: aiohttp.ClientSession, concurrency: int) -> None:
        self.session, self.gate, self.users = session, asyncio.Semaphore(concurrency), 0


class WebClient:
    """Answers questions from the cache, else from the endpoints; equal questions at one time are asked once."""

    def __init__(self, cache: PageCache, web: Web) -> None:
        self._cache, self._web = cache, web
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}
        self._flights: dict[tuple[asyncio.AbstractEventLoop, Question], asyncio.Task[tuple[Page, ...] | RetrievalFault]]
        self._flights = {}

    async def answer(self, question: Question) -> tuple[Page, ...] | RetrievalFault:
        """The pages that answer a search or page question.

        A caller that is cancelled leaves the request in flight: its answer is kept for whoever asks again.
        """
        known = self._cache.get(question)
        if known is not None:
            return known
        if self._web.offline:
            return RetrievalFault(message=f"offline, and the cache has no answer to this {question.kind}")
        key = (asyncio.get_running_loop(), question)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.create_task(self._ask(question))
            flight.add_done_callback(lambda _: self._flights.pop(key, None))
        return await asyncio.shield(flight)

    async def _ask(self, question: Question) -> tuple[Page, ...] | RetrievalFault:
        """Ask the endpoint and keep its answer; a fault is not kept."""
        import aiohttp

        ask = self._find if question.kind == "search" else self._fetch
        try:
            async with self._line() as line, line.gate:
                answer = await ask(line.session, question)
        except TimeoutError:
            return _fault(question, f"gave no answer within {self._web.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            # The text of the error may hold the address of the endpoint, and that a key.
            return _fault(question, f"failed: {type(error).__name__}")
        try:
            self._keep(question, answer)
        except OSError as error:
            return RetrievalFault(message=f"the cache of the web cannot be written: {error.strerror}")
        return answer

    @asynccontextmanager
    async def _line(self) -> AsyncIterator[_Line]:
        """The session of this event loop: opened for the first request in flight, closed after the last."""
        import aiohttp

        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            timeout = aiohttp.ClientTimeout(total=self._web.timeout_s)
            session = aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())
            self._lines[loop] = _Line(session, self._web.concurrency)
        line = self._lines[loop]
        line.users += 1
        try:
            yield line
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[loop]
                await line.session.close()

    async def _find(self, session: aiohttp.ClientSession, question: Question) -> tuple[Page, ...] | RetrievalFault:
        headers = {"X-API-KEY": self._web.search_key} if self._web.search_key else {}
        asked = {"q": question.subject, "num": question.limit}
        async with session.post(self._web.search_url, json=asked, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                return _refusal(question, response.status)
            body = await _read(response.content, self._web.page_bytes)
        if len(body) > self._web.page_bytes:
            return _fault(question, f"gave more than {self._web.page_bytes} bytes")
        try:
            return _found(msgspec.json.decode(body, type=_Results))
        except (ValueError, RecursionError):
            return _fault(question, "gave an answer that is not of its form")

    async def _fetch(self, session: aiohttp.ClientSession, question: Question) -> tuple[Page, ...] | RetrievalFault:
        from yarl import URL

        headers = {"Accept": "text/plain"}
        if self._web.read_key:
            headers["Authorization"] = f"Bearer {self._web.read_key}"
        url = URL(self._web.read_url + question.subject, encoded=True)
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status in _GONE:
                return ()
            if response.status != 200:
                return _refusal(question, response.status)
            body = await _read(response.content, question.limit)
        # Not final: what the cut leaves of a character is dropped.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(body[: question.limit], final=len(body) <= question.limit)
        return _page(question.subject, text)

    def _keep(self, question: Question, answer: tuple[Page, ...] | RetrievalFault) -> None:
        if isinstance(answer, RetrievalFault):
            return
        for page in answer if question.kind == "search" else ():
            shown = snippet_question(page.url, self._web)
            if self._cache.get(shown) is None:
                self._cache.put(shown, (page,))
        self._cache.put(question, answer)


class _Result(msgspec.Struct):
    link: str = ""
    title: str | None = None
    snippet: str | None = None
    position: float | None = None


class _Results(msgspec.Struct):
    organic: list[_Result]


def _found(results: _Results) -> tuple[Page, ...]:
    """The pages of an answer of the search API by position, each where it stands first."""
    pages: dict[str, Page] = {}
    for result in sorted(results.organic, key=lambda result: result.position or float("inf"))[:MOST_RESULTS]:
        url = page_url(result.link)
        if url is not None:
            pages.setdefault(url, Page(url=url, title=result.title or "", text=result.snippet or ""))
    return tuple(pages.values())


def _page(url: str, text: str) -> tuple[Page, ...]:
    """The page of an answer of the reader, which may have a head: `Title: ...`, other lines, `Markdown Content:`.

    Nothing, where a warning in the head says that there is no such page.
    """
    head, mark, body = text.partition("Markdown Content:\n")
    if not mark or not head.startswith("Title:"):
        return (Page(url=url, title="", text=text),)
    title = head.partition("\n")[0].removeprefix("Title:").strip()
    return () if _GONE_BEHIND.search(head) else (Page(url=url, title=title, text=body),)


async def _read(content: aiohttp.StreamReader, limit: int) -> bytes:
    """At most what is read at once beyond `limit` bytes; where there is more than the limit, it was cut."""
    body = bytearray()
    async for part in content.iter_chunked(READ_AT_ONCE):
        body += part
        if len(body) > limit:
            break
    return bytes(body)


def _refusal(question: Question, status: int) -> RetrievalFault:
    hint = {401: " (is its key right?)", 403: " (is its key right?)", 429: " (too many requests)"}.get(status, "")
    return _fault(question, f"answered {status}{hint}")


def _fault(question: Question, what: str) -> RetrievalFault:
    name = "search API" if question.kind == "search" else "page reader"
    return RetrievalFault(message=f"the {name} {what}")


def _check_endpoint(kind: str, url: str, key: str) -> None:
    """Refuse an endpoint that cannot be asked, without repeating it: it may hold a key."""
    if not url:
        instead = ", or env.read.on=false" if kind == "read" else ""
        raise ConfigError(f"the web retriever needs --set run.web.{kind}_url=ADDRESS{instead}")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in PORTS and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"run.web.{kind}_url is no address of the form https://HOST/...")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"run.web.{kind}_key holds characters that a header cannot carry")


def _check_folder(folder: Path, offline: bool) -> None:
    try:
        if not offline:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"cannot make the cache of the web at {folder}: {error.strerror}") from error
    if not folder.is_dir():
        raise CorpusError(f"{folder} is no folder, and run.web.offline answers from what is cached there")
