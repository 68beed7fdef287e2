"""Serves the live page of work under way, which is for this machine only and does nothing but read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness1.errors import InfrastructureFault, UsageError
from harness1.serve.service import Gate, Json, Refused, ServiceLimits, application
from harness1.viewer.live import Watched

HOST = "127.0.0.1"
NAMES = ("localhost", HOST, "[::1]")  # names by which a browser on this machine calls it
LIMITS = ServiceLimits(running=8, waiting=56, connections=256)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def view_app(watched: Watched, limits: ServiceLimits = LIMITS) -> ASGIApp:
    """Return the application that answers `/`, `/news` and `/data/NAME` to pages of its own address."""
    gate = Gate(limits)

    async def answer(made: Callable[[], Any], kind: type[Response], **options: Any) -> Response:
        async with gate:
            try:
                found = await asyncio.to_thread(made)
            except (UsageError, InfrastructureFault) as error:
                return Response(str(error), 500, media_type="text/plain")
        return Response("nothing of that name is here", 404) if found is None else kind(found, **options)

    async def page(_: Request) -> Response:
        return await answer(lambda: "".join(watched.page()), Response, media_type="text/html")

    async def news(request: Request) -> Response:
        seen = request.query_params.get("next", "0")
        seen = seen if seen.isascii() and seen.isdecimal() and len(seen) < 10 else "0"
        return await answer(lambda: watched.news(request.query_params.get("life", ""), int(seen)), Json)

    async def data(request: Request) -> Response:
        return await answer(lambda: watched.data(request.path_params["name"]), Response, media_type="text/plain")

    app = application({}, {"/": page, "/news": news, "/data/{name}": data}, admit=admit)
    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        await app(scope, receive, add)

    return guarded


def admit(scope: Scope) -> None:
    """Raise Refused for a request of a foreign page: it may name this machine (421), and names itself (403)."""
    port = scope["server"][1]
    hosts = NAMES if port == 80 else [f"{name}:{port}" for name in NAMES]  # a browser leaves out the port of HTTP
    given = [(name, value.decode("latin-1").lower()) for name, value in scope["headers"]]
    named = [value for name, value in given if name == b"host"]
    if len(named) != 1 or named[0] not in hosts:
        raise Refused(421, "this server is not of that name")
    if any(name == b"origin" and value.removeprefix("http://") not in hosts for name, value in given):
        raise Refused(403, "pages of other sites may not read this server")
