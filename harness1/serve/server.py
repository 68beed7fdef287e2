"""Run an application on uvicorn, with bounded connections and a clean end."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial

import uvicorn
import uvloop
from starlette.types import ASGIApp

from harness1.errors import UsageError
from harness1.serve.connection import IDLE_S, Clients, Connection
from harness1.serve.service import ServiceLimits

BACKLOG = 1024
"""Connections that the system queues until they are accepted."""
OWN_FILES = 512
"""File descriptors reserved for the index (up to 16 segments of 25 files) and Python."""
SHUTDOWN_S = 5
"""Time limit of calls in flight when the server ends."""
PAUSE_S = 0.01
"""Interval between checks for room for another connection."""
SWEEP_S = 0.5
"""Interval between searches for clients that are to be cut off."""


class SignalFree(uvicorn.Server):
    """uvicorn, except that it leaves signals to the caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class Server(SignalFree):
    """uvicorn, except that it accepts connections only while there is room for them, and cuts off stalled clients.

    uvicorn itself accepts all and answers 503 beyond `limit_concurrency`, and would run out of file descriptors.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, clients: Clients) -> None:
        super().__init__(config)
        self._listener, self._clients, self.servers = listener, clients, []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        self._chores = [asyncio.create_task(self._accept()), asyncio.create_task(self._sweep())]
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
        """Accept while there is room, and make some; the system queues the rest."""
        loop = asyncio.get_running_loop()
        connect = partial(Connection, self.config, self.server_state, self._clients)
        while True:
            if len(self._clients.open) >= self._clients.most:
                began = loop.time()
                await asyncio.sleep(PAUSE_S)
                # After a stall of the loop, what clients sent meanwhile is not read yet.
                if loop.time() - began < 10 * PAUSE_S:
                    self._clients.make_room()
                continue
            try:
                client, _ = await loop.sock_accept(self._listener)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.connect_accepted_socket(connect, client)
            except OSError:
                # The client left while queued, or the process has no file descriptor left.
                await asyncio.sleep(PAUSE_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._clients.close_overdue()


@asynccontextmanager
async def answering(app: ASGIApp, limits: ServiceLimits, host: str, port: int) -> AsyncIterator[int]:
    """Serve an application while the context is open, and yield the port; raise UsageError if nothing can listen
    there."""
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    with await listening(host, port) as listener:
        server = Server(config, listener, Clients(most_connections(limits), limits.answer_bytes))
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
    """Serve an application until SIGTERM or Ctrl-C, with the highest limit of open files that the system allows.

    Args:
        port: 0 lets the system choose one.
        on_ready: called with the port once connections are accepted.
        around: makes what is open while the application is served.

    Raises:
        UsageError: nothing can listen there.
    """

    @asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        async with around(), answering(app, limits, host, port) as bound:
            on_ready(bound)
            yield

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems refuse their own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    until_ended(opened)


def until_ended(opened: Callable[[], AbstractAsyncContextManager[object]]) -> None:
    """Hold a context open in an event loop of its own until SIGTERM or Ctrl-C; then leave it."""

    async def held() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        async with opened():
            await ended.wait()

    # asyncio's own loop is slower.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(held())


def most_connections(limits: ServiceLimits) -> int:
    """Return the limit of open connections: `limits.connections`, or fewer if the limit of open files is low."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.connections
    return max(1, min(limits.connections, files - OWN_FILES))


async def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, with a port of the system's choice for 0; raise UsageError if none can."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
