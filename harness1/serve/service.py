"""The common parts of services: limits, refusals, the gate that bounds the work, and the Starlette application."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harness1.records import Record
from harness1.retrieval.wire import Failure

RETRY_AFTER = {"Retry-After": "1"}
GZIP_OR_ZLIB = 47
"""The window bits with which zlib detects the compression of a body."""

Endpoint = Callable[[Request], Awaitable[Response]]


class ServiceLimits(Record):
    """The limits of a server. Times are in seconds."""

    body_bytes: int = 4 << 20
    body_s: float = 10.0
    queries: int = 4096
    """Queries of one call; the trainer of Search-R1 sends its whole batch at once, 2,560 by default."""
    hits: int = 50_000
    """Hits of one call, summed over its queries."""
    running: int = 128
    waiting: int = 1024
    wait_s: float = 30.0
    deadline_s: float = 120.0
    """Upper limit of a client's deadline."""
    connections: int = 2048


class Refused(HTTPException):
    """A refused request; `detail` tells the client why."""

    def __str__(self) -> str:
        return self.detail


class Json(Response):
    """A response of JSON, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


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


def application(
    posts: Mapping[str, Endpoint],
    gets: Mapping[str, Endpoint],
    failure: Callable[[str, int, str], object] = lambda path, status, reason: Failure(reason),
) -> Starlette:
    """Return an application with endpoints by path, and `/health`.

    Args:
        failure: makes the body of an error from path, status and reason.
    """

    async def health(_: Request) -> Response:
        return Json({"status": "ok"})

    async def failed(request: Request, error: Exception) -> Response:
        path, status, reason, headers = request.url.path, 500, "Internal Server Error", None
        if isinstance(error, HTTPException):
            status, reason, headers = error.status_code, error.detail, error.headers
        if type(error) is HTTPException:
            reason += f": {request.method} {path}; there is POST {', '.join(posts)}, and GET {', '.join(gets)}"
        return Json(failure(path, status, reason), status, headers)

    gets = {**gets, "/health": health}
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route(path, endpoint) for path, endpoint in gets.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: failed, Exception: failed})
    app.router.redirect_slashes = False
    return app


async def read_body(request: Request, limits: ServiceLimits) -> bytes:
    """Return the body of a request, decompressed if necessary.

    The size limit is here because Starlette's own answers in plain text.

    Raises:
        Refused: the body is too large (413), too slow (408), or damaged (400).
    """
    body, most = bytearray(), limits.body_bytes
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    break
        if request.headers.get("content-encoding") in ("gzip", "deflate") and len(body) <= most:
            body[:] = zlib.decompressobj(GZIP_OR_ZLIB).decompress(body, most + 1)
    except TimeoutError as error:
        raise Refused(408, f"the body did not arrive within {limits.body_s:g} s") from error
    except zlib.error as error:
        raise Refused(400, f"the body cannot be read: {error}") from error
    if len(body) > most:
        raise Refused(413, f"the body is larger than {most} bytes")
    return bytes(body)
