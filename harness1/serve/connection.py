"""Connections of uvicorn that bound the head of a request, cancel abandoned requests and close stalled clients."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from harness1.retrieval.wire import Failure

HEAD_BYTES = 8190
"""Limit of the head of a request: the target, and names and values of headers."""
IDLE_S = 30.0
"""A client that sends no complete head, or reads nothing of its answer, for this time is cut off within twice this."""
CROWDED = 0.75
"""Share of open connections from which a connection is closed after its answer, to make room for others."""


class Connection(HttpToolsProtocol):
    """One connection of uvicorn, on a server that keeps at most `most` open at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState, most: int) -> None:
        super().__init__(config, state, {})
        self._app, self.app = self.app, self._run
        self._task: asyncio.Task[Any] | None = None
        self._crowd, self._heads, self._unparsed = most * CROWDED, 0, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watching = self.loop.call_later(IDLE_S, self._watch, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watching.cancel()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > HEAD_BYTES:
            self.send_400_response(f"the head of a request is longer than {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """Begin a request with a valid head."""
        self._heads, self._unparsed = self._heads + 1, len(self.url) + sum(len(b"".join(each)) for each in self.headers)
        if not self.expect_100_continue and any(name == b"expect" for name, _ in self.headers):
            self.send_400_response("the only supported expectation is 100-continue", 417)
        if self._unparsed > HEAD_BYTES or self.transport.is_closing():
            raise ValueError("the request is refused")
        super().on_headers_complete()
        self._unparsed = 0
        if len(self.connections) > self._crowd:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed = 0

    def send_400_response(self, msg: str, status: int = 400) -> None:
        """Send an error and close the connection."""
        if not self.transport.is_closing():
            body = msgspec.json.encode(Failure(msg))
            head = f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
            self.transport.close()

    def _watch(self, seen: tuple[int, int] | None) -> None:
        """Check the connection every `IDLE_S`, and cut off a client that did nothing since the last check.

        uvicorn bounds only the time between requests, and would wait forever for a client to read its answer.
        """
        unsent = self.transport.get_write_buffer_size()
        working = self.cycle is not None and not self.cycle.response_complete and not unsent
        state = None if working else (self._heads, unsent)
        self._watching = self.loop.call_later(IDLE_S, self._watch, state)
        if state is not None and state == seen:
            self.transport.abort()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in a task that `connection_lost` cancels; uvicorn would let it run on."""
        self._task = asyncio.current_task()
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # The client left or the server ends; uvicorn would log an error of the application.
            self.cycle.disconnected = True
            self.transport.abort()
        finally:
            self._task = None
