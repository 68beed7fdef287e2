"""The common parts of services: limits, refusals, the gate that bounds the work, and the Starlette application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

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

Endpoint = Callable[[Request], Awaitable[Response]]


class ServiceLimits(Record):
    """The limits of a server. Times are in seconds."""

    body_bytes: int = 4 << 20
    body_s: float = 10.0
    bodies_bytes: int = 128 << 20
    """Bytes of the bodies above 64 KiB that are arriving or not answered yet, together."""
    answer_bytes: int = 256 << 20
    """Bytes of the answers above 64 KiB that clients have not taken yet, together."""
    query_characters: int = 32_768
    """Characters of a query or a pattern."""
    prompt_characters: int = 4 << 20
    """Characters of the messages and tools of one call to a model: a million tokens."""
    id_characters: int = 131_072
    """Characters of the id of a document or chunk."""
    excluded: int = 200_000
    """Excluded chunks of one call, summed over its queries."""
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
    admit: Callable[[Scope], None] = lambda _: None,
) -> ASGIApp:
    """Return an application with endpoints by path, and `/health`.

    Args:
        failure: makes the body of an error from path, status and reason.
        admit: raises Refused for requests that are not admitted.
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
    return admitting(app, admit, failed)


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return Json(Failure(refused.detail), refused.status_code, refused.headers)


def admitting(
    app: ASGIApp,
    admit: Callable[[Scope], None],
    refused: Callable[[Request, Exception], Awaitable[Response]] = _refused,
) -> ASGIApp:
    """Return an application that answers what `admit` refuses, by raising Refused, with the response of `refused`."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            admit(scope)
        except Refused as error:
            await (await refused(Request(scope), error))(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guarded
