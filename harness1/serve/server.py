"""Run an application on uvicorn, which accepts every connection, bounds neither the head of a request nor the time of
its arrival (`h11` bounds the head, at half the speed), and waits for ever until an answer is taken. Here all are
bounded, and one rule makes room for connections and answers: who has been waited for longest goes first."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from operator import attrgetter
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from harness1.errors import UsageError
from harness1.serve.service import ServiceLimits

HEAD_BYTES = 8190  # limit of the head of a request: the target, and names and values of headers
IDLE_S = 30.0  # time limit for a client to send a whole head, or to begin to take its answer
PACE = 64 << 10  # bytes of its answer that a client must take in each second after the first `IDLE_S`
PRESSED_S = 5.0  # time after which a client that the server waits for is closed if others need its room
CROWDED = 0.75  # share of open connections from which a connection is closed after its answer, to make room for others
OWN_FILES = 512  # file descriptors reserved for the index (up to 16 segments of 25 files) and Python
SHUTDOWN_S = 5  # time limit of calls in flight when the server ends
PAUSE_S, SWEEP_S = 0.01, 0.5  # between looks for room for a connection, and for clients that are to be cut off


class SignalFree(uvicorn.Server):
    """uvicorn, except that it leaves signals to the caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class Server(SignalFree):
    """uvicorn with at most `limits.connections` at once, and `limits.answer_bytes` of answers that nobody took yet."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, limits: ServiceLimits) -> None:
        super().__init__(config)
        self._listener, self.servers = listener, []
        self.most, self._answer_bytes = most_connections(limits), limits.answer_bytes
        self.open: set[Connection] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        self._chores = [asyncio.create_task(chore) for chore in (self._accept(), self._sweep())]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does; then wait for cancelled calls, and close the remaining connections."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.wait(self._chores)
        await super().shutdown([self._listener])
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _accept(self) -> None:
        """Accept while there is room, and make some by closing slow clients; the system queues the rest."""
        loop = asyncio.get_running_loop()
        while True:
            if len(self.open) >= self.most:
                began = loop.time()
                await asyncio.sleep(PAUSE_S)
                # After a stall of the loop, what clients sent meanwhile is not read yet.
                if loop.time() - began < 10 * PAUSE_S:
                    for connection in _slow(self.open)[: max(1, self.most // 8)]:
                        connection.transport.abort()
                continue
            try:
                client, _ = await loop.sock_accept(self._listener)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.connect_accepted_socket(lambda: Connection(self), client)
            except OSError:
                # The client left while queued, or the process has no file descriptor left.
                await asyncio.sleep(PAUSE_S)

    async def _sweep(self) -> None:
        """Cut off clients that had enough time, and, while too much is not taken yet, those that take longest."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in [each for each in self.open if each.is_overdue()]:
                connection.transport.abort()
            held = sum(each.unsent for each in self.open)
            for slowest in sorted((each for each in self.open if each.unsent), key=attrgetter("since")):
                if held <= self._answer_bytes:
                    break
                held -= slowest.unsent
                slowest.transport.abort()


class Connection(HttpToolsProtocol):
    """A connection of uvicorn; `since` is when the server began to wait for its client."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.config, server.server_state, {})
        self._app, self.app = self.app, self._run
        self._task: asyncio.Task[Any] | None = None
        self._server, self._unparsed, self._first_unsent, self.since = server, 0, 0, self.loop.time()

    @property
    def unsent(self) -> int:
        """Bytes of answers that the client has not taken."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    @property
    def waiting(self) -> bool:
        """Whether the server waits for the client, instead of working for it."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self.unsent > 0

    def is_overdue(self) -> bool:
        """Return whether the client has had enough time; that of a body is bounded where it is read."""
        late, unsent = self.loop.time() - self.since - IDLE_S, self.unsent
        self._first_unsent = max(self._first_unsent, unsent) if unsent else 0
        if unsent:
            return self._first_unsent - unsent < late * PACE
        return late > 0 and (self.cycle is None or self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._server.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.open.discard(self)
        # What has answered only ends what it began.
        if self._task is not None and not self.cycle.response_complete:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the head of a request is longer than {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """Begin a request with a valid head."""
        self._unparsed = len(self.url) + sum(len(b"".join(each)) for each in self.headers)
        if self._unparsed > HEAD_BYTES or self.transport.is_closing():
            raise ValueError("the request is refused")
        super().on_headers_complete()
        self._unparsed, self.since = 0, self.loop.time()
        if len(self.connections) > self._server.most * CROWDED:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed = 0

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in a task that `connection_lost` cancels; uvicorn would let it run on."""
        self._task = asyncio.current_task()
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # The client left or the server ends; uvicorn would log an error of the application.
            cycle: Any = getattr(receive, "__self__", self.cycle)  # of pipelined requests, `self.cycle` is the last
            cycle.disconnected = True
            self.transport.abort()
        finally:
            self._task, self.since = None, self.loop.time()


def _slow(connections: set[Connection]) -> list[Connection]:
    found = [each for each in connections if each.waiting and each.loop.time() - each.since > PRESSED_S]
    return sorted(found, key=attrgetter("since"))


@asynccontextmanager
async def answering(app: ASGIApp, limits: ServiceLimits, host: str, port: int) -> AsyncIterator[int]:
    """Serve an application while the context is open, and yield the port; raise UsageError if none can listen there."""
    quiet: dict[str, Any] = {"log_config": None, "log_level": "error", "access_log": False}
    waits: dict[str, Any] = {"timeout_keep_alive": int(IDLE_S), "timeout_graceful_shutdown": SHUTDOWN_S}
    config = uvicorn.Config(app, ws="none", lifespan="off", proxy_headers=False, **quiet, **waits)
    with await listening(host, port) as listener:
        server = Server(config, listener, limits)
        async with running(server):
            yield int(listener.getsockname()[1])


@asynccontextmanager
async def running(server: uvicorn.Server, *listeners: socket.socket) -> AsyncIterator[None]:
    """Run a server while the context is open, on sockets that listen if it has none of its own; then let it end."""
    serving = asyncio.create_task(server.serve(list(listeners) or None))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def serve(
    app: ASGIApp,
    limits: ServiceLimits,
    host: str,
    port: int,
    on_ready: Callable[[int], None] = lambda _: None,
    around: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
) -> None:
    """Serve an application until SIGTERM or Ctrl-C, within what `around` makes; `on_ready` gets the port once
    connections are accepted. Raise UsageError if nothing can listen there."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[None]:
        async with around(), answering(app, limits, host, port) as bound:
            on_ready(bound)
            yield

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems refuse their own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    run_until_ended(serving)


def run_until_ended(serving: Callable[[], AbstractAsyncContextManager[object]]) -> None:
    """Hold a context open in an event loop of its own until SIGTERM or Ctrl-C; then leave it."""

    async def hold() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        async with serving():
            await ended.wait()

    # asyncio's own loop is slower.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hold())


def most_connections(limits: ServiceLimits) -> int:
    """Return the limit of open connections: `limits.connections`, or fewer if the limit of open files is low."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limits.connections if files == resource.RLIM_INFINITY else max(1, min(limits.connections, files - OWN_FILES))


async def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, with a port of the system's choice for 0; raise UsageError if none can."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
