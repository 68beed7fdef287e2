"""Retrieval from the web: a search API finds pages, a page reader reads them, a disk cache keeps every answer.

The search API works like Serper's: `POST {"q", "num"}` with the key in `X-API-KEY` returns `{"organic": [{"title",
"link", "snippet", "position"}]}`. The reader works like Jina's: `GET <its address><address of the page>`, with the key
as bearer token, returns the text of the page. Redirects are faults.

A document is a page under its normalised address. A search finds its snippet, the chunk `ADDRESS#snippet`; reading
returns the page in chunks. `CACHE/3f/3fa0...e1.json` holds a request and its answer, named by the request's digest.
Processes may share a cache, because files are renamed into place; unreadable ones count as absent."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec

from harness1.config import Config, Web
from harness1.errors import MALFORMED, ConfigError, CorpusError, UsageError
from harness1.http.client import HttpClient, is_address
from harness1.plain import digest, text_digest, utf8_safe
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.corpus import Document, chunk
from harness1.retrieval.protocol import Found, IndexInfo, RetrievalFault, Scored, SearchRequest, SearchResult

Resolve = Callable[[str], Awaitable[tuple[str, ...]]]
"""Returns all IP addresses of a name, () if there is no such name; raises OSError if that cannot be found out now."""

_PUBLIC_V6 = IPv6Network("2000::/3")
"""All that is assigned to hosts of the internet (RFC 4291)."""
_NAT64 = IPv6Network("64:ff9b::/96")
"""An IPv4 address in the last 32 bits, as translators of IPv6 networks give it for every name (RFC 6052)."""
_PROTOCOLS = IPv4Network("192.0.0.0/24")
"""Which `is_global` takes for public before Python 3.13."""


async def resolve(host: str) -> tuple[str, ...]:
    """Return the addresses that this machine's resolver gives for a name, or for an address that address."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return ()
        raise
    except UnicodeError:  # a label is empty or too long
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public_address(text: str) -> bool:
    """Return True for an address on the internet; IPv6 addresses that stand for one of IPv4 are judged as that one."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is None:
            return address in _PUBLIC_V6 and address.is_global
        address = inner
    return address.is_global and not address.is_multicast and address not in _PROTOCOLS


HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f.]*:[0-9a-f:.]*")
"""A host: a name or IPv4 address in ASCII, or an IPv6 address without brackets."""
MOST_RESULTS = 100
RESULTS = 10
"""Results requested from the search API beyond those that an episode has seen."""
PAGE_BYTES = 2_000_000
"""Size at which a longer page is cut, at a character boundary; a longer answer of the search API is a fault."""
TIMEOUT_S = 20.0
"""Time for one request, from connecting to the last byte."""
CONNECTIONS = 16
PORTS = {"http": 80, "https": 443}
_IN_ADDRESS = "/?%:@!$&'()*+,;=~-._[]|"
"""Characters of an address that are not escaped, besides letters and digits."""
_LOCAL = frozenset({
    "localhost", "local", "internal", "lan", "home", "corp", "mail", "intranet", "private", "svc", "arpa", "test",
    "invalid", "onion", "alt",
})  # fmt: skip
"""Last labels of names that are of local networks by custom, or that are kept from the internet (RFC 6761, ICANN)."""


def page_url(text: str) -> str | None:
    """Return the normalised form of an address in ASCII: scheme and host in lower case, without default port, fragment
    and parameters `utm_*`. None for other addresses, or where programs differ: user names, dot segments."""
    try:
        parts = urlsplit(text.strip())
        host = (parts.hostname or "").rstrip(".").encode("idna").decode().lower()
        port = "" if parts.port in (None, PORTS.get(parts.scheme)) else f":{parts.port}"
        path, query = (quote(part, safe=_IN_ADDRESS) for part in (parts.path or "/", parts.query))
    except ValueError:
        return None
    if parts.scheme not in PORTS or "@" in parts.netloc or not HOST.fullmatch(host):
        return None
    if {".", ".."} & set(unquote(path).split("/")):
        return None
    kept = "&".join(parameter for parameter in query.split("&") if not parameter.lower().startswith("utm_"))
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}{port}{path}" + (f"?{kept}" if kept else "")


def may_read(url: str, hosts: Sequence[str]) -> bool:
    """Return True if a normalised address may be read: its host or a parent domain is listed, or the list is empty. IP
    addresses in any notation, names without a dot and names of local networks must be listed themselves."""
    host = urlsplit(url).hostname or ""
    listed = {name.lower() for name in hosts}
    last = host.rpartition(".")[2]
    if "." not in host or last[:1].isdigit() or last in _LOCAL:
        return host in listed
    return not listed or any(host == name or host.endswith(f".{name}") for name in listed)


class WebRequest(Record):
    """A web request without keys; equal requests have the same answer. `search`: a query and the number of results.
    `page`: an address and the maximum bytes. `snippet`: an address, as a search first showed it."""

    kind: Literal["search", "page", "snippet"]
    endpoint: str
    subject: str
    limit: int = 0


def page_question(url: str, web: Web, is_snippet: bool = False) -> WebRequest:
    """Return the request of the page at a normalised address, or of the snippet with which a search first showed it."""
    if is_snippet:
        return WebRequest("snippet", _endpoint(web.search_url), url)
    return WebRequest("page", _endpoint(web.read_url), url, PAGE_BYTES)


def _endpoint(url: str) -> str:
    """Return the digest of an endpoint without its parameters and user name, which may be secrets."""
    parts = urlsplit(url)
    return text_digest(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")


class Page(Record):
    """A web page or its snippet, with its normalised address."""

    url: str
    title: str
    text: str


class _Entry(Record):
    question: WebRequest
    pages: tuple[Page, ...]


class PageCache:
    """Answers on disk, as tuples of pages: results best first, one page, or () if there is no page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, question: WebRequest) -> tuple[Page, ...] | None:
        """Return the answer, or None if there is no readable one."""
        try:
            return msgspec.json.decode(self._path(question).read_bytes(), type=_Entry).pages
        except (OSError, *MALFORMED):
            return None

    def put(self, question: WebRequest, pages: tuple[Page, ...]) -> None:
        """Store an answer, replacing an earlier one; raise OSError, and keep the earlier one, if that fails."""
        path = self._path(question)
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(f".{uuid.uuid4().hex}")
        try:
            work.write_bytes(msgspec.json.encode(_Entry(question=question, pages=pages)))
            work.replace(path)
        finally:
            work.unlink(missing_ok=True)

    def _path(self, question: WebRequest) -> Path:
        name = digest(question)
        return self._folder / name[:2] / f"{name}.json"


Pages = tuple[Page, ...] | RetrievalFault
SNIPPET = "#snippet"
_NO_GREP = "a search API has no regular expressions: --set env.grep.on=false"
_GONE = (404, 410)
_HINTS = {401: " (is its key right?)", 403: " (is its key right?)", 429: " (too many requests)"}
_WARNING = re.compile(r"^Warning: Target URL returned error (\d{3})\b", re.MULTILINE)


def open_web(cache: str, config: Config, resolve: Resolve = resolve) -> WebRetriever:
    """Open the web through the endpoints of `config.machine.web`, with its cache in a folder; `resolve` finds the
    addresses of hosts. Raises UsageError: no folder is given; ConfigError: a setting of `machine.web` is unusable, or
    the mechanism `grep` is on; CorpusError: the folder cannot be made, or is missing offline; MissingExtra."""
    web = config.machine.web
    if not cache:
        raise UsageError("the web retriever needs a folder for its cache: --index web:CACHE_FOLDER")
    if config.env.has("grep"):
        raise ConfigError(_NO_GREP)
    _check_endpoint("search", web.search_url, web.search_key)
    if config.env.has("read") or web.read_url:
        _check_endpoint("read", web.read_url, web.read_key)
    for host in web.hosts:
        if not HOST.fullmatch(host.lower()):
            raise ConfigError(f"machine.web.hosts takes names such as en.wikipedia.org, not {host!r}")
    folder = Path(cache)
    try:
        if not web.offline:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"cannot make the cache of the web at {folder}: {error.strerror}") from error
    if not folder.is_dir():
        raise CorpusError(f"{folder} is not a folder, and machine.web.offline answers only from a cache")
    return WebRetriever(PageCache(folder), config, resolve)


def _check_endpoint(kind: str, url: str, key: str) -> None:
    """Refuse an unusable endpoint; the message does not repeat it, because it may contain a key."""
    if not url:
        instead = ", or env.read.on=false" if kind == "read" else ""
        raise ConfigError(f"the web retriever needs --set machine.web.{kind}_url=ADDRESS{instead}")
    if not is_address(url):
        raise ConfigError(f"machine.web.{kind}_url is not an address of the form https://HOST/...")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"machine.web.{kind}_key has characters that a header cannot contain")


class WebRetriever:
    """A `Retriever` over a search API, a page reader and a cache; simultaneous equal requests are sent once."""

    def __init__(self, cache: PageCache, config: Config, resolve: Resolve) -> None:
        self._web, self._chunk_tokens = config.machine.web, config.index.chunk_tokens
        self._cache, self._resolve = cache, resolve
        self._client = None if self._web.offline else HttpClient("", connections=CONNECTIONS)
        self._flights: dict[tuple[asyncio.AbstractEventLoop, WebRequest], asyncio.Task[Pages]] = {}
        self._listed = {host.lower() for host in self._web.hosts}
        settings = ["search and read", RESULTS, sorted(self._listed), PAGE_BYTES, self._chunk_tokens]
        # How the web is searched, not by which endpoints; both counts are unknown.
        self.info = IndexInfo(digest(settings), "document", 0, 0)

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        return list(await asyncio.gather(*map(self._search, requests)))

    async def grep(self, pattern: str, limit: int, deadline: float) -> RetrievalFault:
        return RetrievalFault(_NO_GREP)

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        url = page_url(doc_id)
        if url is None or not may_read(url, self._web.hosts):
            return ()
        if not self._web.read_url:
            return RetrievalFault("machine.web.read_url is not set")
        pages = await self._answer(page_question(url, self._web))
        return pages if isinstance(pages, RetrievalFault) else self._chunks(pages)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...]:
        """Return chunks from the cache, with snippets as first shown, without any web request."""
        known: dict[ChunkId, Chunk] = {}
        for url, is_snippet in {(page_url(chunk_id), chunk_id.endswith(SNIPPET)) for chunk_id in chunk_ids}:
            if url is not None and may_read(url, self._web.hosts):
                pages = self._cache.get(page_question(url, self._web, is_snippet)) or ()
                known |= {each.chunk_id: each for each in (_snippets if is_snippet else self._chunks)(pages)}
        return tuple(known[chunk_id] for chunk_id in chunk_ids if chunk_id in known)

    async def _search(self, request: SearchRequest) -> Found:
        begin = time.perf_counter()
        if request.deadline <= 0:
            return RetrievalFault("deadline")
        if not request.query.strip():
            return SearchResult()
        seen = sum(chunk_id.endswith(SNIPPET) for chunk_id in request.exclude)
        # Extra results replace seen pages: a multiple, so that sibling episodes share more answers.
        number = min(RESULTS * (1 + -(-seen // RESULTS)), MOST_RESULTS)
        sites = " OR ".join(f"site:{host}" for host in sorted(self._listed))
        text = utf8_safe(f"{request.query.strip()} ({sites})" if sites else request.query.strip())
        try:
            async with asyncio.timeout(request.deadline):
                pages = await self._answer(WebRequest("search", _endpoint(self._web.search_url), text, number))
        except TimeoutError:
            return RetrievalFault("deadline")
        if isinstance(pages, RetrievalFault):
            return pages
        hits = [
            Scored(snippet, 1 / rank)
            for rank, snippet in enumerate(_snippets(pages), start=1)
            if snippet.chunk_id not in request.exclude and may_read(snippet.doc_id, self._web.hosts)
        ]
        return SearchResult(tuple(hits[: request.k]), stage_ms={"web": (time.perf_counter() - begin) * 1000})

    def _chunks(self, pages: Sequence[Page]) -> tuple[Chunk, ...]:
        documents = (Document(doc_id=DocId(page.url), title=page.title, text=page.text) for page in pages)
        return tuple(piece for document in documents for piece in chunk(document, self._chunk_tokens))

    async def _answer(self, question: WebRequest) -> Pages:
        """Return the answer to a request. It goes on, and its answer is cached, even if the caller is cancelled."""
        known = self._cache.get(question)
        if known is not None:
            return known
        if self._client is None:
            return RetrievalFault(f"offline, and the cache has no answer to this {question.kind}")
        key = (asyncio.get_running_loop(), question)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.create_task(self._ask(self._client, question))
            flight.add_done_callback(lambda _: self._flights.pop(key, None))
        return await asyncio.shield(flight)

    async def _ask(self, client: HttpClient, question: WebRequest) -> Pages:
        ask = self._find if question.kind == "search" else self._fetch
        try:
            async with await client.turn(), asyncio.timeout(TIMEOUT_S):
                if question.kind == "page" and (host := urlsplit(question.subject).hostname or "") not in self._listed:
                    # The reader may stand in a network of its own, whose hosts no policy may reach through it. This is
                    # not cached, because names move to other addresses, and users list hosts.
                    try:
                        addresses = await self._resolve(host)
                    except OSError:
                        return RetrievalFault(f"the host {host} cannot be resolved now")
                    if not addresses or not all(map(is_public_address, addresses)):
                        return ()
                answer = await ask(client, question)
        except TimeoutError:
            return _fault(question, f"gave no answer within {TIMEOUT_S:g} s")
        except client.errors as error:
            # The error may contain the endpoint's address, which may contain a key.
            return _fault(question, f"failed: {type(error).__name__}")
        if isinstance(answer, RetrievalFault):
            return answer
        try:
            for page in answer if question.kind == "search" else ():
                shown = page_question(page.url, self._web, is_snippet=True)
                if self._cache.get(shown) is None:
                    self._cache.put(shown, (page,))
            self._cache.put(question, answer)
        except OSError as error:
            return RetrievalFault(f"the cache of the web cannot be written: {error.strerror}")
        return answer

    async def _find(self, client: HttpClient, question: WebRequest) -> Pages:
        headers = {"X-API-KEY": self._web.search_key} if self._web.search_key else {}
        body, most = json.dumps({"q": question.subject, "num": question.limit}).encode(), PAGE_BYTES
        status, _, encoded = await client.exchange(self._web.search_url, body, most, headers)
        if status != 200:
            return _fault(question, status)
        if len(encoded) > most:
            return _fault(question, f"gave more than {most} bytes")
        try:
            results = msgspec.json.decode(encoded, type=_Results).organic
        except MALFORMED:
            return _fault(question, "gave a malformed answer")
        pages: dict[str, Page] = {}
        for result in sorted(results, key=lambda result: result.position or float("inf"))[:MOST_RESULTS]:
            url = page_url(result.link)
            if url is not None:
                pages.setdefault(url, Page(url=url, title=result.title or "", text=result.snippet or ""))
        return tuple(pages.values())

    async def _fetch(self, client: HttpClient, question: WebRequest) -> Pages:
        """Read a page. In a head (`Title: ...`, ..., `Markdown Content:`) a warning is an error of the site."""
        key = {"Authorization": "Bearer " + self._web.read_key} if self._web.read_key else {}
        headers, url = {"Accept": "text/plain"} | key, self._web.read_url + question.subject
        status, _, encoded = await client.exchange(url, None, question.limit, headers)
        if status != 200:
            return () if status in _GONE else _fault(question, status)
        # If the text was cut, the decoder is not final, so that it drops an incomplete character.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(encoded[: question.limit], final=len(encoded) <= question.limit)
        head, mark, body = text.partition("Markdown Content:\n")
        if not mark or not head.startswith("Title:"):
            return (Page(url=question.subject, title="", text=text),)
        if warning := _WARNING.search(head):
            status = int(warning[1])
            return () if status in _GONE else _fault(question, f"was answered {status} by the site")
        title = head.partition("\n")[0].removeprefix("Title:").strip()
        return (Page(url=question.subject, title=title, text=body),)


class _Result(msgspec.Struct):
    link: str = ""
    title: str | None = None
    snippet: str | None = None
    position: float | None = None


class _Results(msgspec.Struct):
    organic: list[_Result]


def _snippets(pages: Sequence[Page]) -> tuple[Chunk, ...]:
    return tuple(Chunk(ChunkId(page.url + SNIPPET), DocId(page.url), 0, page.title, page.text) for page in pages)


def _fault(question: WebRequest, what: str | int) -> RetrievalFault:
    """Return the fault of an endpoint, or of the status that it answered."""
    name = "search API" if question.kind == "search" else "page reader"
    if isinstance(what, int):
        what = f"answered {what}{_HINTS.get(what, '')}"
    return RetrievalFault(f"the {name} {what}")
