"""Asking a search API and a page reader, through a disk cache (`retrieval.engines.web` says how they answer)."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from harness1.config import Web
from harness1.retrieval.engines.page_cache import MOST_RESULTS, Page, PageCache, WebRequest, page_url, snippet_question
from harness1.retrieval.protocol import RetrievalFault

if TYPE_CHECKING:
    import aiohttp

READ_AT_ONCE = 65536

_GONE = (404, 410)
_WARNING = re.compile(r"^Warning: Target URL returned error (\d{3})\b", re.MULTILINE)


class _Line:
    """What requests in flight on one event loop share. It lives no longer than they do."""

    def __init__(self, session: aiohttp.ClientSession, concurrency: int) -> None:
        self.session, self.gate, self.users = session, asyncio.Semaphore(concurrency), 0


class WebClient:
    """Answers questions from the cache, else from the endpoints; equal questions at one time are asked once."""

    def __init__(self, cache: PageCache, web: Web) -> None:
        self._cache, self._web = cache, web
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}
        self._flights: dict[
            tuple[asyncio.AbstractEventLoop, WebRequest], asyncio.Task[tuple[Page, ...] | RetrievalFault]
        ]
        self._flights = {}

    async def answer(self, question: WebRequest) -> tuple[Page, ...] | RetrievalFault:
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

    async def _ask(self, question: WebRequest) -> tuple[Page, ...] | RetrievalFault:
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

    async def _find(self, session: aiohttp.ClientSession, question: WebRequest) -> tuple[Page, ...] | RetrievalFault:
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

    async def _fetch(self, session: aiohttp.ClientSession, question: WebRequest) -> tuple[Page, ...] | RetrievalFault:
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
        return _page(question, text)

    def _keep(self, question: WebRequest, answer: tuple[Page, ...] | RetrievalFault) -> None:
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


def _page(question: WebRequest, text: str) -> tuple[Page, ...] | RetrievalFault:
    """The page of an answer of the reader, which may have a head: `Title: ...`, other lines, `Markdown Content:`.

    A warning in the head says that what follows is the error of the site: nothing where it has no such page, else a
    fault.
    """
    head, mark, body = text.partition("Markdown Content:\n")
    if not mark or not head.startswith("Title:"):
        return (Page(url=question.subject, title="", text=text),)
    if warning := _WARNING.search(head):
        status = int(warning[1])
        return () if status in _GONE else _fault(question, f"was answered {status} by the site")
    title = head.partition("\n")[0].removeprefix("Title:").strip()
    return (Page(url=question.subject, title=title, text=body),)


async def _read(content: aiohttp.StreamReader, limit: int) -> bytes:
    """At most what is read at once beyond `limit` bytes; where there is more than the limit, it was cut."""
    body = bytearray()
    async for part in content.iter_chunked(READ_AT_ONCE):
        body += part
        if len(body) > limit:
            break
    return bytes(body)


def _refusal(question: WebRequest, status: int) -> RetrievalFault:
    hint = {401: " (is its key right?)", 403: " (is its key right?)", 429: " (too many requests)"}.get(status, "")
    return _fault(question, f"answered {status}{hint}")


def _fault(question: WebRequest, what: str) -> RetrievalFault:
    name = "search API" if question.kind == "search" else "page reader"
    return RetrievalFault(message=f"the {name} {what}")
