"""Run an application on uvicorn, with bounded connections and a clean end."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress

from harness1.errors import MissingExtra, UsageError
from harness1.serve.connection import IDLE_S, Connection
from harness1.serve.service import ServiceLimits

try:
    import uvicorn
    import uvloop
    from starlette.types import ASGIApp
except ImportError as error:
    raise MissingExtra(error.name or "uvicorn", "serve") from error

BACKLOG = 1024
"""Connections that the system holds until they are accepted."""
OWN_FILES = 512
"""File descriptors that connections leave to the index, of up to 16 segments of 25 files, and to Python."""
SHUTDOWN_S = 5
"""How long calls in flight may still take when the server ends."""
PAUSE_S = 0.01
"""Between two checks for room for another connection."""


class Server(uvicorn.Server):
    """uvicorn, except that a connection is accepted only while there is room for it.

    uvicorn accepts all and answers 503 beyond `limit_concurrency`: a crowd would take all files of the process.

    Args:
        listener: the socket to accept from; closed at the end.
        most: connections that are open at once.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, most: int) -> None:
        super().__init__(config)
        self._listener, self._most = listener, most
        self.servers = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever runs the server."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        self._accepting = asyncio.create_task(self._accept())
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Close stalled connections once a second."""
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self._connections()):
                connection.close_stalled(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does; then wait for the calls that it cancelled, and close what is still open."""
        self._accepting.cancel()
        await super().shutdown([self._listener])
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)
        for connection in list(self._connections()):
            connection.transport.abort()

    async def _accept(self) -> None:
        """Accept while there is room. Those beyond wait with the system, and need not wait long: while it is crowded,
        connections close once answered.
        """
        loop = asyncio.get_running_loop()
        while True:
            if len(self._connections()) >= self._most:
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                client, _ = await loop.sock_accept(self._listener)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.connect_accepted_socket(self._connect, client)
            except OSError:
                # The client left before its turn, or other parts of the process hold all files.
                await asyncio.sleep(PAUSE_S)

    def _connect(self) -> Connection:
        return Connection(self.config, self.server_state, self._most)

    def _connections(self) -> set[Connection]:
        return self.server_state.connections  # type: ignore[return-value]


@asynccontextmanager
async def answering(app: ASGIApp, limits: ServiceLimits, host: str, port: int) -> AsyncIterator[int]:
    """Serve an application while the context is open, and give the port.

    Raises:
        UsageError: nothing can listen there.
    """
    config = uvicorn.Config(
        app,
        interface="asgi3",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    with await _listener(host, port) as listener:
        server = Server(config, listener, most_connections(limits))
        serving = asyncio.create_task(server.serve())
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await serving


async def until_ended(bound: AbstractAsyncContextManager[int], on_ready: Callable[[int], None]) -> None:
    """Keep a port open until SIGTERM, or until cancelled."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with bound as port:
        on_ready(port)
        await ended.wait()


def run(service: Coroutine[None, None, None]) -> None:
    """Run a service to its end on uvloop, on which a request takes less time than on the loop of asyncio."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service)


def most_connections(limits: ServiceLimits) -> int:
    """Return how many connections may be open at once: `limits.connections`, or fewer for want of files."""
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
