"""Retrieval from the web: a search API finds pages, a page reader reads them, a disk cache keeps every answer.

The search API works like Serper's: `POST {"q", "num"}` with the key in `X-API-KEY` returns `{"organic": [{"title",
"link", "snippet", "position"}]}`. The reader works like Jina's: `GET <its address><address of the page>`, with the key
as bearer token, returns the text of the page. Redirects are faults.

A document is a page under its normalised address. A search finds its snippet, the chunk `ADDRESS#snippet`; reading
returns the page, split into chunks as in an index (`harness1.retrieval.corpus`). Normalised addresses have no
fragment, so chunk ids are unique.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from harness1.config import Config
from harness1.errors import ConfigError, CorpusError, UsageError
from harness1.hashing import digest
from harness1.http.client import is_address
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.corpus import Document, chunk
from harness1.retrieval.engines.page_cache import (
    HOST,
    Page,
    PageCache,
    WebRequest,
    allowed,
    page_question,
    page_url,
    search_question,
    snippet_question,
)
from harness1.retrieval.engines.public_hosts import Resolve, resolve
from harness1.retrieval.engines.web_client import WebClient
from harness1.retrieval.protocol import IndexInfo, RetrievalFault, Scored, SearchRequest, SearchResult

SNIPPET = "#snippet"
_NO_GREP = "a search API has no regular expressions: --set env.grep.on=false"


def open_web(cache: str, config: Config, resolve: Resolve = resolve) -> WebRetriever:
    """Open the web through the endpoints of `config.machine.web`, with its cache in a folder.

    Args:
        resolve: finds the addresses of a page's host.

    Raises:
        UsageError: no folder is given.
        ConfigError: a setting of `machine.web` is missing or unusable, or `env.grep.on` is set.
        CorpusError: the folder cannot be made, or is missing in offline mode.
        MissingExtra: httpx is not installed.
    """
    web = config.machine.web
    if not cache:
        raise UsageError("the web retriever needs a folder for its cache: --index web:CACHE_FOLDER")
    if config.env.grep.on:
        raise ConfigError(_NO_GREP)
    _check_endpoint("search", web.search_url, web.search_key)
    if config.env.read.on or web.read_url:
        _check_endpoint("read", web.read_url, web.read_key)
    for host in web.hosts:
        if not HOST.fullmatch(host.lower()):
            raise ConfigError(f"machine.web.hosts takes names such as en.wikipedia.org, not {host!r}")
    _check_folder(Path(cache), web.offline)
    return WebRetriever(PageCache(Path(cache)), config, resolve)


class WebRetriever:
    """A `Retriever` over a search API and a page reader, made by `open_web`."""

    info: IndexInfo
    """The hash covers how the web is searched, not the endpoints. Both counts are 0, because they are unknown."""

    def __init__(self, cache: PageCache, config: Config, resolve: Resolve) -> None:
        self._web, self._chunk_tokens, self._cache = config.machine.web, config.index.chunk_tokens, cache
        self._client = WebClient(cache, config.machine.web, resolve)
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
            return RetrievalFault(message="machine.web.read_url is not set")
        pages = await self._client.answer(page_question(url, self._web))
        return pages if isinstance(pages, RetrievalFault) else self._chunks(pages)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...]:
        """Return chunks from the cache, with snippets as first shown, without any web request."""
        known: dict[WebRequest, dict[ChunkId, Chunk]] = {}
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
        """Return the snippets of the pages found, in the order of the search API, without excluded ones."""
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


def _check_endpoint(kind: str, url: str, key: str) -> None:
    """Refuse an unusable endpoint; the message does not repeat it, because it may contain a key."""
    if not url:
        instead = ", or env.read.on=false" if kind == "read" else ""
        raise ConfigError(f"the web retriever needs --set machine.web.{kind}_url=ADDRESS{instead}")
    if not is_address(url):
        raise ConfigError(f"machine.web.{kind}_url is not an address of the form https://HOST/...")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"machine.web.{kind}_key has characters that a header cannot contain")


def _check_folder(folder: Path, offline: bool) -> None:
    try:
        if not offline:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"cannot make the cache of the web at {folder}: {error.strerror}") from error
    if not folder.is_dir():
        raise CorpusError(f"{folder} is not a folder, and machine.web.offline answers only from a cache")
