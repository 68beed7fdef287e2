"""The two ways to a server of the Model Context Protocol: standard input and output, and streamable HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp.server import Server

    from harness1.serve.access import Access

Close = Callable[[], Awaitable[None]]


def serve_stdio(server: Server[Any], close: Close | None = None) -> None:
    """Answer the client that started this process, until it closes standard input."""
    from mcp.server.stdio import stdio_server

    async def until_closed() -> None:
        try:
            async with stdio_server() as (read, write):
                await server.run(read, write, server.create_initialization_options())
        finally:
            if close is not None:
                await close()

    asyncio.run(until_closed())


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

    serve(admitting(app, access.check), ServiceLimits(), host, port, on_ready, sessions)
