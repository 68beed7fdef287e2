"""Requests to a search API and a page reader through a disk cache; `retrieval.engines.web` describes the APIs."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from urllib.parse import urlsplit

import msgspec

from harness1.config import Web
from harness1.errors import MALFORMED
from harness1.http.client import HttpClient
from harness1.retrieval.engines.page_cache import MOST_RESULTS, Page, PageCache, WebRequest, page_url, snippet_question
from harness1.retrieval.engines.public_hosts import Resolve, is_public
from harness1.retrieval.protocol import RetrievalFault

Pages = tuple[Page, ...] | RetrievalFault

_GONE = (404, 410)
_WARNING = re.compile(r"^Warning: Target URL returned error (\d{3})\b", re.MULTILINE)


class WebClient:
    """Answers requests from the cache, else from the endpoints; simultaneous equal requests are sent once.

    Raises:
        MissingExtra: httpx is not installed, and `web.offline` is off.
    """

    def __init__(self, cache: PageCache, web: Web, resolve: Resolve) -> None:
        self._cache, self._web, self._resolve = cache, web, resolve
        self._listed = {host.lower() for host in web.hosts}
        self._client = None if web.offline else HttpClient("", connections=web.concurrency)
        self._flights: dict[tuple[asyncio.AbstractEventLoop, WebRequest], asyncio.Task[Pages]] = {}

    async def answer(self, question: WebRequest) -> Pages:
        """Return the answer to a request. It goes on, and its answer is cached, even if the caller is cancelled."""
        known = self._cache.get(question)
        if known is not None:
            return known
        if self._client is None:
            return RetrievalFault(message=f"offline, and the cache has no answer to this {question.kind}")
        key = (asyncio.get_running_loop(), question)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.create_task(self._ask(self._client, question))
            flight.add_done_callback(lambda _: self._flights.pop(key, None))
        return await asyncio.shield(flight)

    async def _ask(self, client: HttpClient, question: WebRequest) -> Pages:
        """Ask the endpoint, and cache its answer unless it is a fault."""
        ask = self._find if question.kind == "search" else self._fetch
        try:
            async with await client.turn(), asyncio.timeout(self._web.timeout_s):
                # Not cached, because names move to other addresses, and users list hosts.
                if question.kind == "page" and (refusal := await self._judged(question)) is not None:
                    return refusal
                answer = await ask(client, question)
        except TimeoutError:
            return _fault(question, f"gave no answer within {self._web.timeout_s:g} s")
        except client.errors as error:
            # The error may contain the endpoint's address, which may contain a key.
            return _fault(question, f"failed: {type(error).__name__}")
        try:
            self._keep(question, answer)
        except OSError as error:
            return RetrievalFault(message=f"the cache of the web cannot be written: {error.strerror}")
        return answer

    async def _find(self, client: HttpClient, question: WebRequest) -> Pages:
        headers = {"X-API-KEY": self._web.search_key} if self._web.search_key else {}
        asked, most = json.dumps({"q": question.subject, "num": question.limit}), self._web.page_bytes
        status, _, body = await client.exchange(self._web.search_url, asked.encode(), most, headers)
        if status != 200:
            return _refusal(question, status)
        if len(body) > most:
            return _fault(question, f"gave more than {most} bytes")
        try:
            return _found(msgspec.json.decode(body, type=_Results))
        except MALFORMED:
            return _fault(question, "gave a malformed answer")

    async def _judged(self, question: WebRequest) -> Pages | None:
        """Return the answer for a page whose host is not public, None if the page may be read. The reader may stand in
        a network of its own with this machine, whose hosts no policy may reach through it."""
        host = urlsplit(question.subject).hostname or ""
        try:
            return None if host in self._listed or await is_public(host, self._resolve) else ()
        except OSError:
            return RetrievalFault(message=f"the host {host} cannot be resolved now")

    async def _fetch(self, client: HttpClient, question: WebRequest) -> Pages:
        key = {"Authorization": "Bearer " + self._web.read_key} if self._web.read_key else {}
        headers, url = {"Accept": "text/plain"} | key, self._web.read_url + question.subject
        status, _, body = await client.exchange(url, None, question.limit, headers)
        if status != 200:
            return () if status in _GONE else _refusal(question, status)
        # If the text was cut, the decoder is not final, so that it drops an incomplete character.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(body[: question.limit], final=len(body) <= question.limit)
        return _page(question, text)

    def _keep(self, question: WebRequest, answer: Pages) -> None:
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
    """Return the distinct pages of a search result, by position."""
    pages: dict[str, Page] = {}
    for result in sorted(results.organic, key=lambda result: result.position or float("inf"))[:MOST_RESULTS]:
        url = page_url(result.link)
        if url is not None:
            pages.setdefault(url, Page(url=url, title=result.title or "", text=result.snippet or ""))
    return tuple(pages.values())


def _page(question: WebRequest, text: str) -> Pages:
    """Return the page from an answer of the reader, which may have a head: `Title: ...`, other lines, `Markdown
    Content:`. A warning in the head means an error of the site: () if the page does not exist, else a fault."""
    head, mark, body = text.partition("Markdown Content:\n")
    if not mark or not head.startswith("Title:"):
        return (Page(url=question.subject, title="", text=text),)
    if warning := _WARNING.search(head):
        status = int(warning[1])
        return () if status in _GONE else _fault(question, f"was answered {status} by the site")
    title = head.partition("\n")[0].removeprefix("Title:").strip()
    return (Page(url=question.subject, title=title, text=body),)


def _refusal(question: WebRequest, status: int) -> RetrievalFault:
    hint = {401: " (is its key right?)", 403: " (is its key right?)", 429: " (too many requests)"}.get(status, "")
    return _fault(question, f"answered {status}{hint}")


def _fault(question: WebRequest, what: str) -> RetrievalFault:
    name = "search API" if question.kind == "search" else "page reader"
    return RetrievalFault(message=f"the {name} {what}")
