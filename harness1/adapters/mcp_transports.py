"""The two ways to a server of the Model Context Protocol: standard input and output, and streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from mcp.server import Server
    from starlette.types import ASGIApp, Receive, Scope, Send

    from harness1.serve.access import Access

Close = Callable[[], Awaitable[None]]
CHUNK = 1 << 16
"""Bytes of standard input that are read at once."""


def serve_stdio(server: Server[Any], close: Close | None = None) -> None:
    """Answer the client that started this process, until it closes standard input, or until SIGTERM or Ctrl-C."""
    from mcp.server.stdio import stdio_server

    async def until_closed() -> None:
        try:
            # The package reads in a thread, which no signal ends.
            async with stdio_server(cast(Any, _lines(sys.stdin.fileno()))) as (read, write):
                await server.run(read, write, server.create_initialization_options())
        finally:
            if close is not None:
                await close()

    async def until_ended() -> None:
        serving = asyncio.create_task(until_closed())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        try:
            await asyncio.wait([serving])
        finally:
            serving.cancel()
            await asyncio.wait([serving])
        if not serving.cancelled():
            serving.result()

    asyncio.run(until_ended())


async def _lines(file: int) -> AsyncIterator[str]:
    """Yield the lines of an open file as they come."""
    begun: list[bytes] = []
    while chunk := await _read(file):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*begun, end)).decode(errors="replace")
            begun.clear()
        begun.append(rest)
    if last := b"".join(begun):
        yield last.decode(errors="replace")


async def _read(file: int) -> bytes:
    """Return what can be read without waiting; wait until there is something. Nothing at the end of the file."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(file, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(file)
    return os.read(file, CHUNK)


def serve_http(
    server: Server[Any],
    access: Access,
    host: str,
    port: int,
    on_ready: Callable[[int], None] = lambda _: None,
    close: Close | None = None,
) -> None:
    """Answer clients at /mcp until SIGTERM or Ctrl-C.

    Raises:
        UsageError: nothing can listen there.
    """
    from mcp.server.transport_security import TransportSecuritySettings

    from harness1.serve.server import serve
    from harness1.serve.service import ServiceLimits, admitting

    # Who may call is checked by `access`, which knows the names of this server.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(host=host, transport_security=security)

    @asynccontextmanager
    async def sessions() -> AsyncIterator[None]:
        async with server.session_manager.run():
            try:
                yield
            finally:
                if close is not None:
                    await close()

    serve(admitting(_ending_itself(app), access.check), ServiceLimits(), host, port, on_ready, sessions)


def _ending_itself(app: ASGIApp) -> ASGIApp:
    """Return an application whose requests are not cancelled when their client leaves. The package hears of it and ends
    them; it would take a cancelled one for a failed one, and discard the session that it opened."""
    under_way: set[asyncio.Future[None]] = set()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = asyncio.ensure_future(app(scope, receive, send))
        under_way.add(request)
        request.add_done_callback(under_way.discard)
        await asyncio.shield(request)

    return answer
