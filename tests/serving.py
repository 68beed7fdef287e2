"""Servers on loopback for tests: ours over any retriever, one that imitates others, and a process of the command."""

import asyncio
import re
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from starlette.datastructures import Headers
from starlette.types import ASGIApp

from harness1.config import Config
from harness1.retrieval.protocol import Retriever
from harness1.serve.retrieve import RetrievalService
from harness1.serve.server import answering
from harness1.serve.service import ServiceLimits
from tests.support import Ask, command_process, replying

HOST = "127.0.0.1"


class Reply(NamedTuple):
    """What an application answered without a socket; `headers` are those beside type and length."""

    status: int
    headers: dict[str, str]
    body: bytes
    kind: str


async def asking(
    app: ASGIApp,
    method: str,
    path: str,
    sent: bytes | Callable[[], Awaitable[bytes]],
    headers: Mapping[str, str] = {},
    query: Mapping[str, str] = {},
) -> Reply:
    """Carry out one request without a socket, of JSON to this machine unless the headers say otherwise."""
    answered: list[Any] = []
    headers = {"host": HOST, "content-type": "application/json", **{name.lower(): headers[name] for name in headers}}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": sent if isinstance(sent, bytes) else await sent()}

    async def send(message: Any) -> None:
        answered.append(message)

    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    about = {"type": "http", "method": method, "path": path, "headers": named, "server": (HOST, 80)}
    await app({**about, "query_string": urlencode(query).encode()}, receive, send)
    head, *parts = answered
    found = dict(Headers(raw=head["headers"]))
    body = b"".join(part["body"] for part in parts)
    assert int(found.pop("content-length")) == len(body)
    return Reply(head["status"], found, body, found.pop("content-type"))


@contextmanager
def serving(
    retriever: Retriever, config: Config | None = None, limits: ServiceLimits | None = None, port: int = 0
) -> Iterator[str]:
    def opened() -> AbstractAsyncContextManager[int]:
        service = RetrievalService(retriever, config or Config(), limits)
        return answering(service.app, service.limits, HOST, port)

    with in_thread(opened) as url:
        yield url


@contextmanager
def in_thread(opened: Callable[[], AbstractAsyncContextManager[int]]) -> Iterator[str]:
    bound: list[int] = []
    ready, loop, ended = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def main() -> None:
        async with opened() as found:
            bound.append(found)
            ready.set()
            await ended.wait()

    def work() -> None:
        try:
            loop.run_until_complete(main())
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(10)
    assert bound, "the server did not start"
    try:
        yield f"http://{HOST}:{bound[0]}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(20)
        assert not thread.is_alive()


def imitating(answer: Callable[[str, str, bytes], tuple[int, bytes]]) -> AbstractContextManager[str]:
    """The URL of a server that answers (method, path, body) with a status and a body; it redirects elsewhere."""

    def reply(asked: Ask) -> tuple[int, Mapping[str, str], bytes]:
        status, made = answer(asked.method, asked.path, asked.body)
        return status, {"Location": "/elsewhere"} if 300 <= status < 400 else {}, made

    return replying(reply)


@contextmanager
def process_serving(index: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of `harness1 serve retrieve` and its URL, as `command_process`."""
    with command_process("retrieve", "--index", str(index), "--port", str(port)) as (process, line):
        found = re.search(r"http://\S+:\d+", line)
        assert found, line
        yield process, found[0]
