"""JSON over HTTP to one server: one session for each event loop, failures as values, no secrets in messages."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from email.utils import mktime_tz, parsedate_tz
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from harness1.errors import MissingExtra
from harness1.records import Record
from harness1.redaction import without_password, without_secrets

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession


CONNECTIONS = 64
"""At most, to one server from one event loop, where nothing else is said."""
ANSWER_BYTES = 256 << 20
"""A larger answer is a fault."""
EXCERPT = 300
"""Characters of an error that are repeated."""
SHORTEST_SECRET = 4

Answer = TypeVar("Answer")


class HttpFault(Record):
    """A request that brought no answer of the expected kind. The message holds no password and no key.

    `status` is that of the response, None where none came whole; `retry_after_s` is how long the server asks to wait.
    """

    message: str
    status: int | None = None
    retry_after_s: float | None = None


class HttpClient:
    """Asks one server.

    A command line calls `asyncio.run` many times with one client, and a session belongs to the loop that made it. So
    each loop gets its own, held by an asynchronous generator: a loop that ends closes its generators first, and thereby
    the session. Redirects are not followed: headers with a key go where they were meant to go, and nowhere else.

    Args:
        url: what every path is appended to.
        headers: sent with every request; no message repeats their values.
        connections: the most that are open at once, on one loop.

    Raises:
        MissingExtra: aiohttp is not installed.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, connections: int = CONNECTIONS) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise MissingExtra("aiohttp", "serve") from error
        self._aiohttp = aiohttp
        self.url = url
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._secrets = _secrets(url, headers or {})
        self._connections = connections
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[ClientSession, AsyncGenerator[ClientSession, None]]] = {}

    async def post(self, path: str, body: bytes, kind: type[Answer], timeout_s: float) -> Answer | HttpFault:
        """Post JSON and read the answer as a `kind`; whatever goes wrong on the way is a fault."""
        return await self._ask("POST", path, body, kind, timeout_s)

    async def get(self, path: str, kind: type[Answer], timeout_s: float) -> Answer | HttpFault:
        """Read the answer to a GET as a `kind`; whatever goes wrong on the way is a fault."""
        return await self._ask("GET", path, None, kind, timeout_s)

    async def _ask(
        self, method: str, path: str, body: bytes | None, kind: type[Answer], timeout_s: float
    ) -> Answer | HttpFault:
        try:
            async with asyncio.timeout(timeout_s):
                session, url = await self._session(), self.url + path
                async with session.request(
                    method, url, data=body, headers=self._headers, allow_redirects=False
                ) as response:
                    answer = await _read(response)
        except TimeoutError:
            return self._fault(path, f"no answer within {timeout_s:g} s")
        except (self._aiohttp.ClientError, OSError, ValueError) as error:
            return self._fault(path, f"{type(error).__name__}: {error}")
        if response.status != 200:
            wait = _retry_after(response.headers.get("Retry-After", ""))
            return self._fault(path, f"{response.status} {error_text(answer, self._secrets)}", response.status, wait)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._fault(path, f"not the answer expected: {error}", response.status)

    async def _session(self) -> ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            opened = self._open(loop)
            self._sessions[loop] = await anext(opened), opened
        return self._sessions[loop][0]

    async def _open(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[ClientSession, None]:
        """Nothing in here waits before the session is given out: two first calls cannot both come this way."""
        connector = self._aiohttp.TCPConnector(limit=self._connections)
        timeout = self._aiohttp.ClientTimeout(total=None)
        try:
            async with self._aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                yield session
        finally:
            self._sessions.pop(loop, None)

    def _fault(
        self, path: str, reason: str, status: int | None = None, retry_after_s: float | None = None
    ) -> HttpFault:
        message = f"{without_password(self.url + path)}: {reason}"
        return HttpFault(without_secrets(message, self._secrets), status, retry_after_s)


def error_text(answer: bytes, secrets: Sequence[str] = ()) -> str:
    """What a server says went wrong, without secrets: its `error`, `detail` or `message` (or the `message` within, as
    OpenAI and Anthropic write it), or the beginning of whatever it sent."""
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    said = found.get("error") or found.get("detail") or found.get("message") if isinstance(found, dict) else None
    if isinstance(said, dict):
        said = said.get("message") or said
    said = str(said or answer[: 4 * EXCERPT].decode("utf-8", "replace"))
    return without_secrets(said[: 4 * EXCERPT], secrets)[:EXCERPT]


def _secrets(url: str, headers: Mapping[str, str]) -> tuple[str, ...]:
    """What a message must not repeat: the last word of each header (behind `Bearer`), the password of the address.
    What is shorter than a key can be is left out, for it may be part of any word."""
    password = urlsplit(url).password or ""
    found = {value.split()[-1] for value in headers.values() if value.strip()} | {password, unquote(password)}
    return tuple(sorted((secret for secret in found if len(secret) >= SHORTEST_SECRET), key=len, reverse=True))


def _retry_after(value: str) -> float | None:
    """The seconds of a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3)."""
    try:
        seconds = float(value)
    except ValueError:
        date = parsedate_tz(value)
        if date is None:
            return None
        seconds = mktime_tz(date) - time.time()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


async def _read(response: ClientResponse) -> bytes:
    answer = bytearray()
    async for block in response.content.iter_any():
        answer += block
        if len(answer) > ANSWER_BYTES:
            raise ValueError(f"an answer larger than {ANSWER_BYTES} bytes")
    return bytes(answer)
