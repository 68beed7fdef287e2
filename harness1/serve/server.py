"""The sockets of a service: a thin shell of aiohttp, with bounded connections and a clean end."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from harness1.errors import MissingExtra, UsageError
from harness1.serve.service import ReadBody, Refused, Reply, ServiceLimits

if TYPE_CHECKING:
    from aiohttp import web


BACKLOG = 1024
"""Connections that the system holds until they are accepted."""
OWN_FILES = 512
"""File descriptors that connections leave to the index, of up to 16 segments of 25 files, and to Python."""
IDLE_S = 30.0
"""A connection that sends no whole request for so long is closed."""
SHUTDOWN_S = 5.0
"""How long calls in flight may still take when the server ends."""
CROWDED = 0.75
"""From this share of the connections on, a connection is closed once answered, so that others get their turn."""
PAUSE_S = 0.01
"""Between two looks for room for another connection."""


class Request(NamedTuple):
    """A request whose body is still to be read; names of headers may be in any case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    read: ReadBody


Answer = Callable[[Request], Awaitable[Reply]]


async def until_ended(bound: AbstractAsyncContextManager[int], on_ready: Callable[[int], None]) -> None:
    """Keep a port open until SIGTERM, or until cancelled."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with bound as port:
        on_ready(port)
        await ended.wait()


@asynccontextmanager
async def answering(answer: Answer, limits: ServiceLimits, host: str, port: int) -> AsyncIterator[int]:
    """Accept connections while the context is open; gives the port.

    Raises:
        MissingExtra: aiohttp is not installed.
        UsageError: nothing can listen there.
    """
    try:
        from aiohttp import web
    except ImportError as error:
        raise MissingExtra("aiohttp", "serve") from error

    most = most_connections(limits)

    async def handle(request: web.Request) -> web.Response:
        asked = Request(request.method, request.path, request.query, request.headers, lambda: _body(request, limits))
        reply = await answer(asked)
        headers = {"Content-Type": "application/json", **reply.headers}
        response = web.Response(status=reply.status, body=reply.body, headers=headers)
        if _connections(runner) > most * CROWDED:
            response.force_close()
        return response

    from harness1.serve.connection import Connection

    application = web.Application(client_max_size=limits.body_bytes)
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True)
    settings: dict[str, Any] = {"access_log": None, "keepalive_timeout": IDLE_S}
    with await _listener(host, port) as listener:
        await runner.setup()
        assert runner.server is not None
        connect = partial(Connection, runner.server, loop=asyncio.get_running_loop(), **settings)
        try:
            async with asyncio.TaskGroup() as group:
                accepting = group.create_task(_accept(listener, connect, runner, most))
                yield int(listener.getsockname()[1])
                accepting.cancel()
        finally:
            await runner.cleanup()


def most_connections(limits: ServiceLimits) -> int:
    """Connections that may be open at once: `limits.connections`, or fewer where the system gives fewer files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.connections
    return max(1, min(limits.connections, files - OWN_FILES))


def lift_file_limit() -> None:
    """Let this process open as many files as the system allows it to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems promise more than they give
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _listener(host: str, port: int) -> socket.socket:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


async def _accept(
    listener: socket.socket, connect: Callable[[], asyncio.Protocol], runner: web.AppRunner, most: int
) -> None:
    """Take connections as long as there is room; asyncio's own server would take all that come, and run out of files.

    Those beyond wait with the system, and need not wait long: while it is crowded, connections close once answered.
    """
    loop = asyncio.get_running_loop()
    while True:
        if _connections(runner) >= most:
            await asyncio.sleep(PAUSE_S)
            continue
        try:
            connection, _ = await loop.sock_accept(listener)
            await loop.connect_accepted_socket(connect, connection)
        except OSError:
            # The client left before its turn, or other parts of the process hold all files.
            await asyncio.sleep(PAUSE_S)


def _connections(runner: web.AppRunner) -> int:
    return len(runner.server.connections) if runner.server is not None else 0


async def _body(request: web.Request, limits: ServiceLimits) -> bytes:
    """The whole body of a request, within the limits of size and time."""
    from aiohttp import web

    try:
        async with asyncio.timeout(limits.body_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(413, f"the body is larger than {limits.body_bytes} bytes") from error
    except web.RequestPayloadError as error:
        raise Refused(400, f"the body cannot be read: {error}") from error
    except TimeoutError as error:
        raise Refused(408, f"the body did not arrive within {limits.body_s:g} s") from error
