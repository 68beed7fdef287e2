"""Connections of uvicorn that bound what a client can make the server read, hold and wait for."""

from __future__ import annotations

import asyncio
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from harness1.freed_memory import return_memory
from harness1.retrieval.engines.remote import Failure
from harness1.serve.service import RETRY_AFTER

HEAD_BYTES = 8190
"""Limit of the head of a request: the target, and names and values of headers."""
IDLE_S = 30.0
"""Time limit for a client to send a whole head; after it, a client must also keep pace in taking its answer."""
PACE = 64 << 10
"""Bytes of its answer that a client must take in each second after the first `IDLE_S`."""
PRESSED_S = 5.0
"""Time after which a client that the server waits for is closed if others need its room."""
CROWDED = 0.75
"""Share of open connections from which a connection is closed after its answer, to make room for others."""
SMALL = 64 << 10
"""Bytes of an answer that need no room: every connection may hold as much."""
PIPELINED = 16
"""Requests that may wait behind the one that is answered, on one connection."""
RETURNED_BYTES = 32 << 20
"""Bytes of large answers after which their memory is returned to the system, as soon as none is sent."""
IGNORED_BYTES = 64 << 20
"""Bytes of a body that are read and dropped, after a request was refused, so that its client sees the refusal."""


class Clients:
    """The connections of a server: at most `most` at once, and `answer_bytes` of answers that are not taken yet.

    Room is made by closing the clients that the server has waited for longest, whatever it waits for: a head, a body,
    a further request, or that an answer is taken.
    """

    def __init__(self, most: int, answer_bytes: int) -> None:
        self.most, self.crowd, self._answer_bytes = most, most * CROWDED, answer_bytes
        self.open: set[Connection] = set()
        self._taking: set[Connection] = set()
        self._passed = self._seen = 0

    def close_overdue(self) -> None:
        """Cut off the clients that do nothing, or too little, for too long."""
        for connection in [each for each in self.open if each.overdue()]:
            connection.transport.abort()
        quiet = self._passed == self._seen and not any(each.unsent for each in self._taking)
        if quiet and self._passed > RETURNED_BYTES:
            self._passed = 0
            return_memory()
        self._seen = self._passed

    def make_room(self) -> None:
        """Close an eighth of the connections at most, so that others can be accepted."""
        for connection in _slow(self.open)[: max(1, self.most // 8)]:
            connection.transport.abort()

    def admit(self, taker: Connection, size: int) -> bool:
        """Count an answer until it is taken; return False if there is no room for it."""
        self._taking = {each for each in self._taking if each.unsent}
        held = sum(each.answer for each in self._taking)
        for connection in _slow(self._taking) if held + size > self._answer_bytes else ():
            connection.transport.abort()
            held -= connection.answer
            self._taking.discard(connection)
            if held + size <= self._answer_bytes:
                break
        if held + size > self._answer_bytes:
            return False
        taker.answer = taker.unsent + size
        self._passed += size
        self._taking.add(taker)
        return True


class Connection(HttpToolsProtocol):
    """One connection of uvicorn. `answer` is the size of its large answers, `since` when the server began to wait."""

    def __init__(self, config: uvicorn.Config, state: ServerState, clients: Clients) -> None:
        super().__init__(config, state, {})
        self._app, self.app = self.app, self._run
        self._task: asyncio.Task[Any] | None = None
        self._clients, self._unparsed, self._ignored, self._first_unsent = clients, 0, 0, 0
        self.answer, self.since = 0, self.loop.time()

    @property
    def unsent(self) -> int:
        """Bytes of answers that the client has not taken."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    @property
    def waiting(self) -> bool:
        """Whether the server waits for the client, instead of working for it."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self.unsent > 0

    def overdue(self) -> bool:
        """Return whether the client has had enough time for what the server waits for.

        uvicorn bounds only the time between requests; the time of a body is bounded where it is read.
        """
        late, unsent = self.loop.time() - self.since - IDLE_S, self.unsent
        self._first_unsent = max(self._first_unsent, unsent) if unsent else 0
        if unsent:
            return self._first_unsent - unsent < late * PACE
        return late > 0 and (self.cycle is None or self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._clients.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._clients.open.discard(self)
        # What has answered only ends what it began.
        if self._task is not None and not self.cycle.response_complete:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > HEAD_BYTES:
            self.send_400_response(f"the head of a request is longer than {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """Begin a request with a valid head."""
        self._unparsed = len(self.url) + sum(len(b"".join(each)) for each in self.headers)
        if not self.expect_100_continue and any(name == b"expect" for name, _ in self.headers):
            self.send_400_response("the only supported expectation is 100-continue", 417)
        if self._unparsed > HEAD_BYTES or len(self.pipeline) >= PIPELINED or self.transport.is_closing():
            raise ValueError("the request is refused")
        # The parser keeps the space behind a value, which is no part of it (RFC 9110, section 5.5).
        self.headers[:] = [(name, value.strip(b" \t")) for name, value in self.headers]
        super().on_headers_complete()
        self._unparsed = self._ignored = 0
        self.since = self.loop.time()
        if len(self.connections) > self._clients.crowd:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed = 0
        if self.cycle.response_complete:
            self._ignored += len(body)
            if self._ignored > IGNORED_BYTES:
                self.transport.abort()

    def send_400_response(self, msg: str, status: int = 400) -> None:
        """Send an error and close the connection."""
        if not self.transport.is_closing():
            body = msgspec.json.encode(Failure(msg))
            head = f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
            self.transport.close()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in a task that `connection_lost` cancels; uvicorn would let it run on."""
        self._task = asyncio.current_task()
        try:
            await self._app(scope, receive, partial(self._send, send, []))
        except asyncio.CancelledError:
            # The client left or the server ends; uvicorn would log an error of the application.
            self.cycle.disconnected = True
            self.transport.abort()
        finally:
            self._task, self.since = None, self.loop.time()

    async def _send(self, send: Send, held: list[Message], message: Message) -> None:
        """Send an answer if there is room for it, and else a refusal; its start is held until its size is known."""
        if message["type"] == "http.response.start":
            held.append(message)
            return
        body = message.get("body", b"")
        if held and len(body) > SMALL and not self._clients.admit(self, len(body)):
            body = msgspec.json.encode(Failure("clients have not taken too many answers yet"))
            headers = {"content-type": "application/json", "content-length": str(len(body)), **RETRY_AFTER}
            held = [{**held.pop(), "status": 503, "headers": Headers(headers).raw}]
            message = {**message, "body": body}
        while held:
            await send(held.pop())
        await send(message)


def _slow(connections: set[Connection]) -> list[Connection]:
    """Return the connections that the server has waited for longer than `PRESSED_S`, longest first."""
    found = [each for each in connections if each.waiting and each.loop.time() - each.since > PRESSED_S]
    return sorted(found, key=attrgetter("since"))
