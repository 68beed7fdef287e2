"""Hold what every service needs: limits, refusals, the gate that bounds the work, and the Starlette application."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from harness1.errors import HarnessError, MissingExtra
from harness1.records import Record
from harness1.retrieval.wire import Failure

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtra(error.name or "starlette", "serve") from error

RETRY_AFTER = {"Retry-After": "1"}
GZIP_OR_ZLIB = 47
"""The window bits with which zlib finds out by itself how a body is compressed."""

Endpoint = Callable[[Request], Awaitable[Response]]
Shape = Callable[[str, int, str], object]
"""Make the body of a failure from the path, the status and the message."""


class ServiceLimits(Record):
    """The work that one server accepts. Times are in seconds."""

    body_bytes: int = 4 << 20
    body_s: float = 10.0
    queries: int = 4096
    """In one call: the trainer of Search-R1 asks for its whole batch at once, 2,560 queries by default."""
    hits: int = 50_000
    """In one call: the sum over its queries."""
    running: int = 128
    waiting: int = 1024
    wait_s: float = 30.0
    deadline_s: float = 120.0
    """A later deadline of a client is cut to this."""
    connections: int = 2048


class Refused(HarnessError):
    """A request is not carried out; the client is told the status and the reason."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


class Gate:
    """Let a bounded number of calls run and a bounded number wait for a bounded time; refuse the rest (503)."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._places = asyncio.Semaphore(limits.running)
        self._free = limits.running + limits.waiting
        self._wait_s = limits.wait_s

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


def _plain(path: str, status: int, message: str) -> Failure:
    return Failure(message)


def application(posts: Mapping[str, Endpoint], gets: Mapping[str, Endpoint], shape: Shape = _plain) -> Starlette:
    """Return an application that answers every failure in JSON: refused, not found, and unforeseen ones alike.

    Args:
        posts: endpoints by path, and so `gets`.
        shape: makes the body of a failure.
    """
    known = ", ".join([*posts, *gets])

    async def failed(request: Request, error: Exception) -> Response:
        path, headers = request.url.path, dict[str, str]()
        match error:
            case Refused():
                status, message, headers = error.status, str(error), error.headers
            case HTTPException(status_code=404):
                status, message = 404, f"there is no {path} here, but {known}"
            case HTTPException(status_code=405):
                allowed = "POST" if path in posts else "GET"
                status, message, headers = 405, f"{path} takes {allowed}, not {request.method}", {"Allow": allowed}
            case _:
                status, message = 500, "Internal Server Error"
        return json_response(shape(path, status, message), status, headers)

    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route(path, endpoint) for path, endpoint in gets.items()]
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys((Refused, HTTPException, Exception), failed))
    app.router.redirect_slashes = False
    return app


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a value as a response of JSON."""
    return respond(msgspec.json.encode(value), status, headers)


def respond(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response, of JSON where the headers do not say otherwise."""
    return Response(body, status, headers, "application/json")


async def health(_: Request) -> Response:
    """Say that the server is up."""
    return json_response({"status": "ok"})


async def read_body(request: Request, limits: ServiceLimits) -> bytes:
    """Return the whole body of a request, inflated if it came compressed.

    Starlette's own limit answers in plain text, so the size is watched here.

    Raises:
        Refused: the body is too large (413), too slow (408), or damaged (400).
    """
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                _bound(body, limits)
    except TimeoutError as error:
        raise Refused(408, f"the body did not arrive within {limits.body_s:g} s") from error
    return _inflated(body, limits) if request.headers.get("content-encoding") in ("gzip", "deflate") else bytes(body)


def _inflated(body: bytearray, limits: ServiceLimits) -> bytes:
    inflater = zlib.decompressobj(GZIP_OR_ZLIB)
    try:
        found = inflater.decompress(body, limits.body_bytes + 1)
    except zlib.error as error:
        raise Refused(400, f"the body cannot be read: {error}") from error
    _bound(found, limits)
    if not inflater.eof:
        raise Refused(400, "the body cannot be read: it ends too early")
    return found


def _bound(body: bytes | bytearray, limits: ServiceLimits) -> None:
    if len(body) > limits.body_bytes:
        raise Refused(413, f"the body is larger than {limits.body_bytes} bytes")
