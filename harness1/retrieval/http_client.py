"""JSON over HTTP for retrievers: one session for each event loop, and failures as values."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, TypeVar

import msgspec

from harness1.errors import MissingExtra
from harness1.retrieval.retriever import RetrievalFault

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

CONNECTIONS = 64
"""At most, to one server from one event loop."""
ANSWER_BYTES = 256 << 20
"""A larger answer is a fault."""
EXCERPT = 300
"""Characters of an error that are repeated."""

Answer = TypeVar("Answer")


class HttpClient:
    """Posts to one server.

    A command line calls `asyncio.run` many times with one retriever, and a session belongs to the loop that made it.
    So each loop gets its own, held by an asynchronous generator: a loop that ends closes its generators first, and
    thereby the session.

    Raises:
        MissingExtra: aiohttp is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise MissingExtra("aiohttp", "serve") from error
        self._aiohttp = aiohttp
        self.url = url
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[ClientSession, AsyncGenerator[ClientSession, None]]] = {}

    async def post(self, path: str, body: bytes, kind: type[Answer], timeout_s: float) -> Answer | RetrievalFault:
        """Post JSON and read the answer as a `kind`; whatever goes wrong on the way is a fault."""
        try:
            async with asyncio.timeout(timeout_s):
                session = await self._session()
                headers = {"Content-Type": "application/json"}
                async with session.post(self.url + path, data=body, headers=headers, allow_redirects=False) as response:
                    answer = await _read(response)
                    if response.status != 200:
                        return self._fault(path, f"{response.status} {error_text(answer)}")
        except TimeoutError:
            return self._fault(path, f"no answer within {timeout_s:g} s")
        except (self._aiohttp.ClientError, OSError, ValueError) as error:
            return self._fault(path, f"{type(error).__name__}: {error}")
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._fault(path, f"not the answer expected: {error}")

    async def _session(self) -> ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            opened = self._open(loop)
            self._sessions[loop] = await anext(opened), opened
        return self._sessions[loop][0]

    async def _open(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[ClientSession, None]:
        """Nothing in here waits before the session is given out: two first calls cannot both come this way."""
        connector = self._aiohttp.TCPConnector(limit=CONNECTIONS)
        timeout = self._aiohttp.ClientTimeout(total=None)
        try:
            async with self._aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                yield session
        finally:
            self._sessions.pop(loop, None)

    def _fault(self, path: str, reason: str) -> RetrievalFault:
        return RetrievalFault(f"{self.url}{path}: {reason}")


def without_password(address: str) -> str:
    """An address as it may be shown: without the user name and password of `http://USER:PASSWORD@HOST`."""
    return re.sub(r"^((?:\w+:)+/*)[^/]*@", r"\1", address)


def error_text(answer: bytes) -> str:
    """What a server says went wrong: its `error` or `detail`, or the beginning of whatever it sent."""
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    said = found.get("error") or found.get("detail") if isinstance(found, dict) else None
    return str(said or answer[: 4 * EXCERPT].decode("utf-8", "replace"))[:EXCERPT]


async def _read(response: ClientResponse) -> bytes:
    answer = bytearray()
    async for block in response.content.iter_any():
        answer += block
        if len(answer) > ANSWER_BYTES:
            raise ValueError(f"an answer larger than {ANSWER_BYTES} bytes")
    return bytes(answer)
