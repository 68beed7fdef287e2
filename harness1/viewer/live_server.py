"""The server of a live page: this machine only, and nothing but reading.

It needs no extra, because the viewer is for everybody. The server of the standard library is enough here: it listens on
loopback, takes no bodies, and answers from memory; `serve` has the one for networks.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from harness1.errors import InfrastructureFault, UsageError
from harness1.viewer.watching import Watched

HOST = "127.0.0.1"
NAMES = ("localhost", HOST, "[::1]")
"""Names by which a browser on this machine calls it."""
CLIENTS = 32
"""Requests that are answered at a time; others wait."""
SILENT_S = 10.0
"""Time after which a client that sends nothing is cut off."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """Answers `/`, `/news` and `/data/NAME` to pages of its own address.

    Args:
        port: 0 lets the system choose one.

    Raises:
        UsageError: nothing can listen there.
    """

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        self.watched = watched
        self._places = threading.BoundedSemaphore(CLIENTS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UsageError(f"cannot listen on {HOST}:{port}: {error.strerror or error}") from error
        # A browser leaves out the port of HTTP itself.
        self.hosts = frozenset(NAMES if port == 80 else (f"{name}:{self.server_port}" for name in NAMES))

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, once there is a place for it."""
        self._places.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and free the place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave a client that has gone alone; anything else is reported."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = SILENT_S
    server: LiveServer

    def do_GET(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            self._answer(*refusal)
            return
        parts = urlsplit(self.path)
        try:
            if parts.path == "/":
                self._answer(200, "".join(self.server.watched.page()), "text/html")
            elif parts.path == "/news":
                self._answer(200, self._news(parse_qs(parts.query)), "application/json")
            elif parts.path.startswith("/data/") and (text := self.server.watched.data(parts.path[6:])) is not None:
                self._answer(200, text)
            else:
                self._answer(404, "nothing of that name is here")
        except (UsageError, InfrastructureFault) as error:
            self._answer(500, str(error))

    def _news(self, asked: dict[str, list[str]]) -> str:
        seen = asked.get("next", ["0"])[0]
        seen = seen if seen.isascii() and seen.isdecimal() and len(seen) < 10 else "0"
        return msgspec.json.encode(self.server.watched.news(asked.get("life", [""])[0], int(seen))).decode()

    def _refusal(self) -> tuple[int, str] | None:
        """Return why a request is refused: a page of another site may reach this machine under a name of its own (421),
        and say whose page it is (403)."""
        named = [each.lower() for each in self.headers.get_all("Host", [])]
        if len(named) != 1 or named[0] not in self.server.hosts:
            return 421, "this server is not of that name"
        own = {f"http://{host}" for host in self.server.hosts}
        if any(each.lower() not in own for each in self.headers.get_all("Origin", [])):
            return 403, "pages of other sites may not read this server"
        return None

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""

    def version_string(self) -> str:
        """Return the name of the server, without the versions of what it runs on."""
        return "harness1"


def serve_view(server: LiveServer) -> None:
    """Answer until SIGTERM or Ctrl-C."""
    with server, _ended_by_signal(), suppress(_Ended):
        server.serve_forever(poll_interval=0.2)


class _Ended(Exception):
    pass


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    def end(*_: object) -> None:
        raise _Ended

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
