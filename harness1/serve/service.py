"""What all services have: limits, refusals, a gate that bounds the work, who may call, and bounded bodies."""

from __future__ import annotations

import asyncio
import hmac
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from harness1.records import Record
from harness1.retrieval.engines.remote import Failure

RETRY_AFTER = {"Retry-After": "1"}
LOCAL = ("localhost", "127.0.0.1", "::1")
JSON = "application/json"
CODINGS = ("gzip", "x-gzip", "deflate")
STEP = 128 << 10  # bytes that are inflated between two turns of the event loop
SMALL = 64 << 10  # bytes of a body that need no room: every connection may send as much
PRESSED_S = 2.0  # time after which a body that is still arriving is refused if others need its room, the slowest first

Endpoint = Callable[[Request], Awaitable[Response]]
Fail = Callable[[str, int, str], object]  # makes the body of an error from path, status and reason
Admit = Callable[[Scope], None]  # raises Refused for what is not admitted


class ServiceLimits(Record):
    """The limits of a server. Times are in seconds."""

    body_bytes: int = 4 << 20
    body_s: float = 10.0
    bodies_bytes: int = 128 << 20  # bytes of the bodies above 64 KiB that are arriving or not answered yet, together
    answer_bytes: int = 256 << 20  # bytes of the answers that clients have not taken yet, together
    query_characters: int = 32_768  # characters of a query or a pattern
    prompt_characters: int = 4 << 20  # characters of the messages and tools of one call to a model: a million tokens
    id_characters: int = 131_072  # characters of the id of a document or chunk
    excluded: int = 200_000  # excluded chunks of one call, summed over its queries
    queries: int = 4096  # queries of one call; the trainer of Search-R1 sends its whole batch at once, 2,560 by default
    hits: int = 50_000  # hits of one call, summed over its queries
    running: int = 128
    waiting: int = 1024
    wait_s: float = 30.0
    deadline_s: float = 120.0  # upper limit of a client's deadline
    connections: int = 2048


class Refused(HTTPException):
    """A refused request; `detail` tells the client why."""

    def __str__(self) -> str:
        return self.detail


class Json(Response):
    """A response of JSON, encoded by msgspec."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class Gate:
    """Let a bounded number of calls run and a bounded number wait for a bounded time; refuse the rest (503)."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._places, self._wait_s = asyncio.Semaphore(limits.running), limits.wait_s
        self._free = limits.running + limits.waiting

    async def __aenter__(self) -> None:
        if not self._free:
            raise Refused(503, "too many calls are waiting", RETRY_AFTER)
        self._free -= 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except BaseException as error:
            self._free += 1
            if isinstance(error, TimeoutError):
                raise Refused(503, f"no turn came within {self._wait_s:g} s", RETRY_AFTER) from error
            raise

    async def __aexit__(self, *_: object) -> None:
        self._free += 1
        self._places.release()


def plain(path: str, status: int, reason: str) -> object:
    """Return the body of an error as the `Retriever` protocol has it."""
    return Failure(reason)


def application(
    posts: Mapping[str, Endpoint], gets: Mapping[str, Endpoint], failure: Fail = plain, admit: Admit = lambda _: None
) -> ASGIApp:
    """Return an application with endpoints by path, and `/health`, behind `guard`."""

    async def health(_: Request) -> Response:
        return Json({"status": "ok"})

    async def fail(request: Request, error: Exception) -> Response:
        path, status, reason, headers = request.url.path, 500, "Internal Server Error", None
        if isinstance(error, HTTPException):
            status, reason, headers = error.status_code, error.detail, error.headers
        if type(error) is HTTPException:
            reason += f": {request.method} {path}; there is POST {', '.join(posts)}, and GET {', '.join(gets)}"
        return Json(failure(path, status, reason), status, headers)

    gets = {**gets, "/health": health}
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route(path, endpoint) for path, endpoint in gets.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: fail, Exception: fail})
    app.router.redirect_slashes = False
    return guard(app, admit, failure)


def guard(app: ASGIApp, admit: Admit, failure: Fail = plain) -> ASGIApp:
    """Return an application that refuses what `admit` refuses."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response: ASGIApp = app
        try:
            admit(scope)
        except Refused as error:
            body = failure(scope["path"], error.status_code, error.detail)
            response = Json(body, error.status_code, error.headers)
        await response(scope, receive, send)

    return answer


class Access:
    """Who may call a server: whoever knows its token, if it has one, as bearer token or `x-api-key`, and calls it by
    this machine's loopback, one of `hosts`, or with `addresses` by any IP address, which no page can make its own. A
    web page can send requests to servers on its reader's machine: the browser names its site in `Origin`; in `Host`
    too, if the page made its own name resolve to this machine (DNS rebinding)."""

    def __init__(self, hosts: Iterable[str] = (), token: str = "", addresses: bool = False) -> None:
        self._hosts = frozenset((*LOCAL, *(host.lower().strip("[]").rstrip(".") for host in hosts))) - {""}
        self._token, self._addresses = token.encode(), addresses

    def check(self, scope: Scope) -> None:
        """Raise Refused if a request is not admitted: by its host (421), its origin (403) or its token (401), which is
        removed from the request, so that nothing behind can record it."""
        if scope["path"] == "/health":  # which tells nothing
            return
        named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        here = self._own_host(f"//{named[0]}") if len(named) == 1 else ""
        if not here:
            raise Refused(421, f"this server is not {' or '.join(named)[:100]!r}: start it with --allow-host NAME")
        # A foreign page may stand at an IP address of its own: it must be of this server's very host.
        if foreign := [each for each in origins if self._own_host(each) not in (*self._hosts, here)]:
            raise Refused(403, f"pages of {foreign[0][:100]!r} may not call this server")
        if self._token:
            kept = [each for each in scope["headers"] if not self._is_token(*each)]
            if len(kept) == len(scope["headers"]):
                raise Refused(401, "this server asks for its token", {"WWW-Authenticate": "Bearer"})
            scope["headers"] = kept

    def _own_host(self, address: str) -> str:
        try:
            parts = urlsplit(address)
            host = (parts.hostname or "").rstrip(".")
            plain = parts.path == parts.query == parts.fragment == "" and parts.username is None and parts.port != 0
            if plain and host not in self._hosts and self._addresses:
                ip_address(host)
        except ValueError:
            return ""
        return host if plain and (host in self._hosts or self._addresses) else ""

    def _is_token(self, name: bytes, value: bytes) -> bool:
        if name == b"authorization":
            scheme, _, value = value.partition(b" ")
            return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), self._token)
        return name == b"x-api-key" and hmac.compare_digest(value.strip(), self._token)


@dataclass(eq=False)
class _Body:
    began: float
    time: asyncio.Timeout | None = None  # its time limit; None once it is complete
    size: int = 0


class Bodies:
    """Reads the bodies of calls, which are JSON and may be compressed, and bounds the bytes of those not answered yet.
    A body is read before its call takes a place in the line: only its own client waits for a slow one."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._large: set[_Body] = set()
        self._held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body of a request, decompressed if necessary; it counts until the context ends. Raise Refused if it
        is too large (413), too slow (408), damaged (400), not JSON or in an unknown encoding (415), or there is no room
        for it (503). Starlette's own size limit answers in plain text."""
        coding, body, content = _coding(request), _Body(asyncio.get_running_loop().time()), bytearray()
        try:
            try:
                async with asyncio.timeout(self._limits.body_s) as body.time:
                    async for part in _inflate(request.stream()) if coding else request.stream():
                        content += part
                        self._count(body, len(part))
                body.time = None
            except TimeoutError as error:
                limit = f"within {self._limits.body_s:g} s, or others needed its room"
                raise Refused(408, f"the body did not arrive {limit}") from error
            except zlib.error as error:
                raise Refused(400, f"the body cannot be read: {error}") from error
            whole = bytes(content)
            content.clear()
            yield whole
        finally:
            self._forget(body)

    def _count(self, body: _Body, size: int) -> None:
        body.size += size
        if body in self._large:
            self._held += size
        elif body.size > SMALL:
            self._held += body.size
            self._large.add(body)
        if body.size > self._limits.body_bytes:
            raise Refused(413, f"the body is larger than {self._limits.body_bytes} bytes")
        if body not in self._large or self._held <= self._limits.bodies_bytes:
            return
        now, arriving = asyncio.get_running_loop().time(), [each for each in self._large if each.time]
        slow = [each for each in arriving if now - each.began > PRESSED_S]
        for each in sorted(slow, key=lambda each: each.size / (now - each.began)):
            if self._held > self._limits.bodies_bytes and each.time is not None and not each.time.expired():
                each.time.reschedule(each.began)
                self._forget(each)
        if self._held > self._limits.bodies_bytes:
            raise Refused(503, "too many large bodies are arriving", RETRY_AFTER)

    def _forget(self, body: _Body) -> None:
        if body in self._large:
            self._large.discard(body)
            self._held -= body.size


def _coding(request: Request) -> str:
    """Return the compression of a body, "" for none; raise Refused if it cannot be read here."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    coding = request.headers.get("content-encoding", "").strip().lower()
    if kind != JSON:
        raise Refused(415, f"bodies are JSON: send Content-Type: {JSON}, not {kind[:100] or 'none'}")
    if coding not in ("", "identity", *CODINGS):
        raise Refused(415, f"bodies are compressed by {', '.join(CODINGS)} or not at all, not by {coding[:100]}")
    return "" if coding == "identity" else coding


async def _inflate(parts: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    inflater = zlib.decompressobj(47)  # gzip or zlib
    async for part in parts:
        while part or not inflater.eof:
            inflated = inflater.decompress(part, STEP)
            yield inflated
            part = inflater.unconsumed_tail
            if inflater.unused_data:
                raise zlib.error("something follows the end of the compressed data")
            if len(inflated) == STEP:
                await asyncio.sleep(0)
            elif not part:
                break
    if not inflater.eof:
        raise zlib.error("the compressed data is incomplete")
