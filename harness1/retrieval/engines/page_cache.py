"""Pages of the web: their addresses, and the disk cache of what was asked about them, which makes a run repeatable.

    CACHE/3f/3fa0...e1.json    one question and its answer, named by the digest of the question

Processes may share a folder: a file is written whole under another name, then renamed into place. A file that a
crash tore, or that somebody edited into something else, counts as absent.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec

from harness1.config import Web
from harness1.hashing import digest, text_digest
from harness1.plain import utf8_safe
from harness1.records import Record

HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f.]*:[0-9a-f:.]*")
"""A host: a name or IPv4 address in ASCII, or an IPv6 address without its brackets."""
MOST_RESULTS = 100
"""What a search API gives at most for one query."""
PORTS = {"http": 80, "https": 443}
"""The schemes of the web, with the ports that go without saying."""
_IN_ADDRESS = "/?%:@!$&'()*+,;=~-._[]|"
"""What stands in an address as it is, beside letters and digits."""
_LOCAL = ("localhost", "local", "internal")


def page_url(text: str) -> str | None:
    """The one spelling of an address under which its page is known, in ASCII; None for what is no web address.

    Scheme and host are in lower case; the default port, the fragment and parameters `utm_*` are left out. What programs
    read in different ways is no address: a user name, characters that no host has, dot segments.
    """
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


def allowed(url: str, hosts: Sequence[str]) -> bool:
    """Whether a normalised address may be read: its host or a parent of it is listed, or no host is.

    IP addresses in any spelling, names without a dot and names of local networks must be listed themselves. Where the
    name of a public host leads is for the reader to judge, which resolves it.
    """
    host = urlsplit(url).hostname or ""
    listed = {name.lower() for name in hosts}
    last = host.rpartition(".")[2]
    if "." not in host or last[:1].isdigit() or last in _LOCAL:
        return host in listed
    return not listed or any(host == name or host.endswith(f".{name}") for name in listed)


class WebRequest(Record):
    """All that decides an answer, and no key: two equal questions have one answer.

    `search`: a query and the number of results asked for. `page`: an address and the most bytes that are read of it.
    `snippet`: an address; the answer is how a search first showed that page.
    """

    kind: Literal["search", "page", "snippet"]
    endpoint: str
    """Digest of the address that was asked."""
    subject: str
    """The query, or the address of the page."""
    limit: int = 0


def search_question(query: str, seen: int, web: Web) -> WebRequest:
    """What a search asks for: among pages of the listed hosts, as many results more as pages were seen.

    Their number is rounded up to whole multiples of `web.results`, so that sibling episodes share more answers.
    """
    sites = " OR ".join(f"site:{host}" for host in sorted({host.lower() for host in web.hosts}))
    asked = f"{query.strip()} ({sites})" if sites else query.strip()
    number = min(web.results * (1 + -(-seen // web.results)), MOST_RESULTS)
    return WebRequest(kind="search", endpoint=_endpoint(web.search_url), subject=utf8_safe(asked), limit=number)


def page_question(url: str, web: Web) -> WebRequest:
    """What reading the page at a normalised address asks for."""
    return WebRequest(kind="page", endpoint=_endpoint(web.read_url), subject=url, limit=web.page_bytes)


def snippet_question(url: str, web: Web) -> WebRequest:
    """Where the cache keeps how a search first showed the page at a normalised address."""
    return WebRequest(kind="snippet", endpoint=_endpoint(web.search_url), subject=url)


def _endpoint(url: str) -> str:
    """Names an endpoint without its parameters and user name, which may be secrets."""
    parts = urlsplit(url)
    return text_digest(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")


class Page(Record):
    """A page of the web, or the snippet of one, under its normalised address."""

    url: str
    title: str
    text: str


class _Entry(Record):
    question: WebRequest
    pages: tuple[Page, ...]


class PageCache:
    """Answers on disk, each one a tuple of pages: results best first, or a page, or nothing where there is no page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, question: WebRequest) -> tuple[Page, ...] | None:
        """The answer, or None where there is none that can be read."""
        try:
            entry = msgspec.json.decode(self._path(question).read_bytes(), type=_Entry)
        except (OSError, ValueError):
            return None
        return entry.pages if entry.question == question else None

    def put(self, question: WebRequest, pages: tuple[Page, ...]) -> None:
        """Keep an answer in place of an earlier one.

        Raises:
            OSError: the folder cannot be written; the earlier answer stays.
        """
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
