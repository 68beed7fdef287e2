"""HTTP to one server: a session for each event loop, failures as values, no secrets in messages."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from email.utils import mktime_tz, parsedate_tz
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from urllib.parse import unquote, urlsplit

import msgspec

from harness1.errors import MissingExtra
from harness1.records import Record
from harness1.redaction import without_password, without_secrets

if TYPE_CHECKING:
    from httpx import AsyncClient


CONNECTIONS = 64
"""Open connections to one server from one event loop, where nothing else is said."""
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


class _Line(NamedTuple):
    """What requests on one event loop share."""

    sender: Any
    turn: asyncio.Semaphore


class HttpClient:
    """Asks one server.

    A command line calls `asyncio.run` many times with one client, and a session belongs to the loop that made it. So
    each loop gets its own, held by an asynchronous generator: a loop that ends closes its generators first, and thereby
    the session. Redirects are not followed, so that a key goes where it was meant to go and nowhere else. Cookies are
    not kept, and nothing is taken from the environment.

    Args:
        url: what every path is appended to.
        headers: sent with every request; no message repeats their values.
        connections: the most that are open at once, on one loop.

    Attributes:
        errors: what `exchange` raises.

    Raises:
        MissingExtra: httpx is not installed.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, connections: int = CONNECTIONS) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingExtra("httpx", "serve") from error
        self.errors = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)
        self.url, self._headers, self._connections = url, dict(headers or {}), connections
        self._secrets = _secrets(url, self._headers)
        self._lines: dict[asyncio.AbstractEventLoop, tuple[_Line, AsyncGenerator[_Line, None]]] = {}

    async def post(self, path: str, body: bytes, kind: type[Answer], timeout_s: float) -> Answer | HttpFault:
        """Post JSON and read the answer as a `kind`; whatever goes wrong on the way is a fault."""
        return await self._ask(path, body, kind, timeout_s)

    async def get(self, path: str, kind: type[Answer], timeout_s: float) -> Answer | HttpFault:
        """Read the answer to a GET as a `kind`; whatever goes wrong on the way is a fault."""
        return await self._ask(path, None, kind, timeout_s)

    async def exchange(
        self, path: str, body: bytes | None, limit: int, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Post a body of JSON, or get where there is none; return status, headers, and little more than `limit` bytes
        of the answer."""
        (session, _), url = await self._line(), self.url + path
        method, json = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        async with session.stream(method, url, content=body, headers=json | dict(headers or {})) as response:
            answer, blocks = bytearray(), cast("AsyncGenerator[bytes]", response.aiter_bytes())
            async with aclosing(blocks):
                async for block in blocks:
                    answer += block
                    if len(answer) > limit:
                        break
            return response.status_code, response.headers, bytes(answer)

    def sender(self, session: AsyncClient) -> Any:
        """Return what sends requests on one event loop."""
        return session

    async def turn(self) -> asyncio.Semaphore:
        """Return what bounds the requests in flight on this event loop, for callers whose time must not run while they
        wait for a connection."""
        return (await self._line()).turn

    async def _ask(self, path: str, body: bytes | None, kind: type[Answer], timeout_s: float) -> Answer | HttpFault:
        status = wait = None
        try:
            async with asyncio.timeout(timeout_s):
                status, headers, answer = await self.exchange(path, body, ANSWER_BYTES)
            if len(answer) > ANSWER_BYTES:
                reason = f"an answer larger than {ANSWER_BYTES} bytes"
            elif status != 200:
                wait, reason = _retry_after(headers.get("Retry-After", "")), error_text(answer, self._secrets)
                reason = f"{status} {reason}"
            else:
                return msgspec.json.decode(answer, type=kind)
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = f"not the answer expected: {error}"
        except self.errors as error:
            reason = _reason(error)
        message = f"{without_password(self.url + path)}: {reason}"
        return HttpFault(without_secrets(message, self._secrets), status, wait)

    async def _line(self) -> _Line:
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            opened = self._open(loop)
            self._lines[loop] = await anext(opened), opened
        return self._lines[loop][0]

    async def _open(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[_Line, None]:
        """Nothing in here waits before the session is given out: two first calls cannot both come this way."""
        from httpx import AsyncClient, Limits

        try:
            async with AsyncClient(
                headers=self._headers,
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
                limits=Limits(max_connections=self._connections),
                timeout=None,
                trust_env=False,
                verify=_certificates(),
            ) as session:
                yield _Line(self.sender(session), asyncio.Semaphore(self._connections))
        finally:
            self._lines.pop(loop, None)


def is_address(url: str) -> bool:
    """Return whether a client can ask at an address: http or https, a host, and a port if any that exists."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def error_text(answer: bytes, secrets: Sequence[str] = ()) -> str:
    """Return what a server says went wrong, without secrets: its `error`, `detail` or `message` (or the `message`
    within, as OpenAI and Anthropic write it), or the beginning of whatever it sent."""
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    said = found.get("error") or found.get("detail") or found.get("message") if isinstance(found, dict) else None
    if isinstance(said, dict):
        said = said.get("message") or said
    said = str(said or answer[: 4 * EXCERPT].decode("utf-8", "replace"))
    return without_secrets(said[: 4 * EXCERPT], secrets)[:EXCERPT]


def _reason(error: BaseException) -> str:
    """Return why a request failed, from the cause where httpx says no more than that there is no connection."""
    import httpx

    if not isinstance(error, httpx.ConnectError):
        return f"{type(error).__name__}: {error}"
    chain: list[BaseException] = []
    while error not in chain:  # a cause that is raised again may stand in a circle
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    refused = any(isinstance(each, ConnectionRefusedError) for each in chain)
    return f"Cannot connect: {'connection refused' if refused else chain[-1]}"


@cache
def _certificates() -> ssl.SSLContext:
    """Return the authorities that this machine trusts, which takes 20 ms to read."""
    return ssl.create_default_context()


def _secrets(url: str, headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a message must not repeat: the words of each header, without its `Bearer`, and the password of the
    address. What is shorter than a key can be is left out, for it may be part of any word."""
    password = urlsplit(url).password or ""
    words = {word for value in headers.values() for word in value.split()} - {"Bearer"}
    found = words | {password, unquote(password)}
    return tuple(sorted((secret for secret in found if len(secret) >= SHORTEST_SECRET), key=len, reverse=True))


def _retry_after(value: str) -> float | None:
    """Return the seconds of a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3)."""
    try:
        seconds = float(value)
    except ValueError:
        date = parsedate_tz(value)
        if date is None:
            return None
        seconds = mktime_tz(date) - time.time()
    return max(seconds, 0.0) if math.isfinite(seconds) else None
