"""Addresses of web pages, and the disk cache of web requests that makes runs repeatable.

    CACHE/3f/3fa0...e1.json    a request and its answer, named by the digest of the request

Processes may share a folder, because files are written under a temporary name and renamed. Files that cannot be read
count as absent.
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
from harness1.errors import MALFORMED
from harness1.hashing import digest, text_digest
from harness1.plain import utf8_safe
from harness1.records import Record

HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f.]*:[0-9a-f:.]*")
"""A host: a name or IPv4 address in ASCII, or an IPv6 address without brackets."""
MOST_RESULTS = 100
"""Limit of results of a search API for one query."""
PORTS = {"http": 80, "https": 443}
"""Default ports by scheme."""
_IN_ADDRESS = "/?%:@!$&'()*+,;=~-._[]|"
"""Characters of an address that are not escaped, besides letters and digits."""
_LOCAL = frozenset({
    "localhost", "local", "internal", "lan", "home", "corp", "mail", "intranet", "private", "svc", "arpa", "test",
    "invalid", "onion", "alt",
})  # fmt: skip
"""Last labels of names that are of local networks by custom, or that are kept from the internet (RFC 6761, ICANN)."""


def page_url(text: str) -> str | None:
    """Return the normalised form of an address in ASCII, or None if it is not a web address.

    Scheme and host are in lower case; the default port, the fragment and parameters `utm_*` are left out. Addresses on
    which programs differ are refused: those with a user name, invalid hosts or dot segments.
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
    """Return True if a normalised address may be read: its host or a parent domain is listed, or the list is empty.

    IP addresses in any notation, names without a dot and names of local networks must be listed themselves. What other
    names resolve to is judged before a page is read (`public_hosts.is_public`).
    """
    host = urlsplit(url).hostname or ""
    listed = {name.lower() for name in hosts}
    last = host.rpartition(".")[2]
    if "." not in host or last[:1].isdigit() or last in _LOCAL:
        return host in listed
    return not listed or any(host == name or host.endswith(f".{name}") for name in listed)


class WebRequest(Record):
    """A web request without keys; equal requests have the same answer.

    `search`: a query and the number of results. `page`: an address and the maximum bytes to read. `snippet`: an
    address; the answer is the page as a search first showed it.
    """

    kind: Literal["search", "page", "snippet"]
    endpoint: str
    """Digest of the endpoint's address."""
    subject: str
    """The query, or the address of the page."""
    limit: int = 0


def search_question(query: str, seen: int, web: Web) -> WebRequest:
    """Return the request of a search on the listed hosts, with extra results to replace `seen` pages.

    The number of results is a multiple of `web.results`, so that sibling episodes share more answers.
    """
    sites = " OR ".join(f"site:{host}" for host in sorted({host.lower() for host in web.hosts}))
    text = f"{query.strip()} ({sites})" if sites else query.strip()
    number = min(web.results * (1 + -(-seen // web.results)), MOST_RESULTS)
    return WebRequest(kind="search", endpoint=_endpoint(web.search_url), subject=utf8_safe(text), limit=number)


def page_question(url: str, web: Web) -> WebRequest:
    """Return the request of the page at a normalised address."""
    return WebRequest(kind="page", endpoint=_endpoint(web.read_url), subject=url, limit=web.page_bytes)


def snippet_question(url: str, web: Web) -> WebRequest:
    """Return the cache entry of the snippet with which a search first showed a page."""
    return WebRequest(kind="snippet", endpoint=_endpoint(web.search_url), subject=url)


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
            entry = msgspec.json.decode(self._path(question).read_bytes(), type=_Entry)
        except (OSError, *MALFORMED):
            return None
        return entry.pages if entry.question == question else None

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
