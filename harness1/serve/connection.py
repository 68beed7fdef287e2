"""Adapt the connections of uvicorn: bound the heads of requests, cancel what nobody waits for, close what stalls."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from harness1.errors import MissingExtra
from harness1.retrieval.wire import Failure

try:
    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
    from uvicorn.server import ServerState
except ImportError as error:
    raise MissingExtra(error.name or "uvicorn", "serve") from error

FIELD_BYTES = 8190
"""The longest value of one header."""
HEAD_BYTES = 65_536
"""The most that is read of a request line and headers that do not end."""
IDLE_S = 30.0
"""A connection is closed if for so long it sends no whole head of a request, or takes nothing of an answer."""
CROWDED = 0.75
"""From this share of the connections on, a connection is closed once answered, so that others get their turn."""


class Connection(HttpToolsProtocol):
    """One connection of uvicorn, with bounds on time and size.

    Args:
        most: connections that the server keeps open at once.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, most: int) -> None:
        super().__init__(config, state, {})
        self._app, self.app = self.app, self._run
        self._task: asyncio.Task[Any] | None = None
        self._crowd = most * CROWDED
        self._heads, self._head_bytes, self._in_head = 0, 0, True
        self._seen, self._since = (0, 0), self.loop.time()

    def close_stalled(self, now: float) -> None:
        """Close the connection if it has long been the client's turn and the client did nothing."""
        unsent = self.transport.get_write_buffer_size()
        working = self.cycle is not None and not self.cycle.response_complete
        if (working and not unsent) or self._seen != (self._heads, unsent):
            self._seen, self._since = (self._heads, unsent), now
        elif now - self._since > IDLE_S:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES:
            self.send_400_response("the head of the request is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(value) > FIELD_BYTES:
            raise ValueError("a header is too long")
        if name.lower() == b"expect" and value.lower() != b"100-continue":
            self._refuse(417, "nothing can be expected but 100-continue")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._heads, self._head_bytes, self._in_head = self._heads + 1, 0, False
        if len(self.connections) > self._crowd:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, and close the connection."""
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(Failure(message))
        head = f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request in a task that `connection_lost` cancels: uvicorn itself would let it go on for nobody."""
        app: ASGIApp = self._app
        self._task = asyncio.current_task()
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            # The client left or the server ends. uvicorn would log either as an error of the application.
            self.cycle.disconnected = True
            self.transport.abort()
        finally:
            self._task = None
