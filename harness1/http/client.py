"""The HTTP client for one server: failures as values, no secrets in messages, and the retry policy of all requests."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.http.chat_stream import ChatStream
from harness1.plain import secrets_of, without_password, without_secrets
from harness1.records import Record

if TYPE_CHECKING:
    import ssl

    from httpx import AsyncClient

CONNECTIONS = 64  # default number of open connections to one server from one event loop
ANSWER_BYTES = 256 << 20  # largest answer in bytes; a larger one is a fault
LONGEST_WAIT_S = 60.0  # limit of the wait that a server asks for
EXCERPT = 300  # characters of a server's error that a message repeats
SHORTEST_SECRET = 4
SHORTEST_TOKEN, TOKEN_BYTES = 16, 4096
Answer = TypeVar("Answer")


class Transient(Exception):
    """A failure that a retry may fix: its reason without secrets, and the wait in seconds that the server asked for."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = min(wait_s or 0.0, LONGEST_WAIT_S)


BACKOFF_S = 0.2  # seconds; the wait before the n-th new try is half to all of this times 2 to the n


async def retry(call: Callable[[], Awaitable[Answer]], attempts: int) -> Answer:
    """Await a call, and again while it raises `Transient`, after `BACKOFF_S` times 2, 4, ... with jitter on top of the
    server's own wait; raise InfrastructureFault if it failed `attempts` times."""
    attempt = 1
    while True:
        try:
            return await call()
        except Transient as fault:
            if attempt >= attempts:
                raise InfrastructureFault(f"{fault} ({attempts} attempts)") from fault
            wait_s = fault.wait_s + BACKOFF_S * 2.0**attempt * random.uniform(0.5, 1.0)
        await asyncio.sleep(wait_s)
        attempt += 1


class HttpFault(Record):
    """A request without a usable answer. Its message holds no secret; `status` is None without a complete response."""

    message: str
    status: int | None = None
    retry_after_s: float | None = None
    connected: bool = True  # false if there was no connection to send the request over


Line = tuple["AsyncClient", asyncio.Semaphore]  # the session of an event loop, and the semaphore of its requests


class HttpClient:
    """A client for one server, whose address is the prefix of every path; messages never repeat the values of its
    headers. Raise MissingExtra without httpx. Redirects are not followed, because they would carry the key elsewhere;
    cookies are not kept, and environment variables are ignored. `answer_bytes` limits an answer (None: `ANSWER_BYTES`).

    A session belongs to the event loop that made it, and the command line calls `asyncio.run` many times with one
    client, so each loop gets its own, held by an asynchronous generator, which a loop closes before it ends."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        connections: int = CONNECTIONS,
        answer_bytes: int | None = None,
    ) -> None:
        with optional("serve", "httpx"):
            import httpx
        self.errors = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)  # what `exchange` raises
        self.url, self._headers, self._connections = url, dict(headers or {}), connections
        self._limit = answer_bytes or ANSWER_BYTES
        # Shorter strings than a key may be part of ordinary words.
        words = {word for value in self._headers.values() for word in value.split()} - {"Bearer"}
        secrets = [word for word in words.union(secrets_of(url)) if len(word) >= SHORTEST_SECRET]
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._lines: dict[asyncio.AbstractEventLoop, tuple[Line, AsyncGenerator[Line, None]]] = {}

    async def exchange(
        self,
        path: str,
        body: bytes | None,
        limit: int,
        headers: Mapping[str, str] | None = None,
        feed: Callable[[bytes], bool] | None = None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Post a JSON body, or GET without one; return status, headers and the answer, cut soon after `limit` bytes. A
        stream of events goes to `feed` instead, until that returns True; then the connection is closed. Raise what
        `errors` has, ValueError if a stream goes on beyond `limit`."""
        from httpx import DecodingError

        (session, _), url = await self._line(), self.url + path
        method, json = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        async with session.stream(method, url, content=body, headers=json | dict(headers or {})) as response:
            coding = response.headers.get("Content-Encoding", "identity").lower()
            if coding != "identity":
                raise DecodingError(f"a compressed answer ({coding[:20]}), which nobody asked for")
            answer, read, blocks = bytearray(), 0, cast("AsyncGenerator[bytes]", response.aiter_raw())
            is_stream = response.status_code == 200 and is_events(response.headers)
            async with aclosing(blocks):
                async for block in blocks:
                    read += len(block)
                    if feed is not None and is_stream:
                        if feed(block):
                            break
                        if read > limit:
                            raise ValueError(f"an answer larger than {limit} bytes")
                        continue
                    answer += block
                    if read > limit:
                        break
            return response.status_code, response.headers, bytes(answer)

    async def turn(self) -> asyncio.Semaphore:
        """Return the semaphore of requests on this event loop; waiting for it is no part of a request's time."""
        return (await self._line())[1]

    async def ask(
        self, path: str, body: bytes | None, kind: type[Answer], timeout_s: float, stream: ChatStream | None = None
    ) -> Answer | HttpFault:
        """Exchange a body and decode the answer as `kind` (`bytes`: as it is); return any failure as a fault. `stream`:
        joins an answer that comes as one, of which each part may take `timeout_s`."""
        status, wait, connected = None, None, True
        accept = {"Accept": "text/event-stream, application/json" if stream else "application/json"}
        try:
            async with asyncio.timeout(timeout_s) as clock:

                def feed(block: bytes) -> bool:
                    clock.reschedule(asyncio.get_running_loop().time() + timeout_s)
                    return stream is not None and stream.feed(block)

                fed = feed if stream else None
                status, headers, answer = await self.exchange(path, body, self._limit, accept, fed)
            if stream and status == 200 and is_events(headers):
                if stream.error is None:
                    return msgspec.convert(stream.completion(), kind)
                code = stream.error.get("code") if isinstance(stream.error, dict) else None
                status = code if isinstance(code, int) and 300 <= code < 600 else 500
                reason = f"{status} {error_text(msgspec.json.encode({'error': stream.error}), self._secrets)}"
            elif len(answer) > self._limit:
                reason = f"an answer larger than {self._limit} bytes"
            elif status == 200:
                return cast(Answer, answer) if kind is bytes else msgspec.json.decode(answer, type=kind)
            else:
                wait = _retry_after(headers.get("Retry-After", ""))
                reason = f"{status} {error_text(answer, self._secrets)}"
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = f"unexpected answer: {error}"
        except self.errors as error:
            reason, connected = _reason(error)
        message = f"{without_password(self.url + path)}: {reason}"
        return HttpFault(without_secrets(message, self._secrets), status, wait, connected)

    async def _line(self) -> Line:
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            opened = self._open(loop)
            self._lines[loop] = await anext(opened), opened
        return self._lines[loop][0]

    async def _open(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[Line, None]:
        """Yield the session of a loop. Nothing is awaited before the yield, so two first calls cannot both open one."""
        from http.cookiejar import CookieJar, DefaultCookiePolicy

        from httpx import AsyncClient, Limits

        try:
            async with AsyncClient(
                headers={"Accept-Encoding": "identity", **self._headers},
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
                limits=Limits(max_connections=self._connections),
                timeout=None,
                trust_env=False,
                verify=_certificates(),
            ) as session:
                yield session, asyncio.Semaphore(self._connections)
        finally:
            self._lines.pop(loop, None)


def bearer(file: str) -> dict[str, str]:
    """Return the headers that present the token in a file, none for ""; raise UsageError as `read_token` does."""
    return {"Authorization": f"Bearer {read_token(file)}"} if file else {}


def read_token(file: str) -> str:
    """Return the token in a file; raise UsageError if that cannot be read, or is not 16 or more of printable ASCII."""
    try:
        with Path(file).expanduser().open("rb") as opened:
            token = opened.read(TOKEN_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token cannot be read from {file}: {getattr(error, 'strerror', 'not text')}") from error
    if len(token) < SHORTEST_TOKEN or not re.fullmatch(r"[!-~]+", token):
        raise UsageError(f"{file} must hold one word of at least {SHORTEST_TOKEN} ASCII characters: a token")
    return token


def is_events(headers: Mapping[str, str]) -> bool:
    """Return True if an answer is a stream of server-sent events."""
    return headers.get("Content-Type", "").lower().startswith("text/event-stream")


def is_address(url: str) -> bool:
    """Return True if an address is http or https with a host and, if it names a port, a valid one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def error_text(answer: bytes, secrets: Sequence[str] = ()) -> str:
    """Return a server's error without secrets: its `error`, `detail` or `message`, or the answer's beginning."""
    try:
        body = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    reason = body.get("error") or body.get("detail") or body.get("message") if isinstance(body, dict) else None
    if isinstance(reason, dict):
        reason = reason.get("message") or reason
    text = str(reason or answer[: 4 * EXCERPT].decode("utf-8", "replace"))
    return without_secrets(text[: 4 * EXCERPT], secrets)[:EXCERPT]


def _reason(error: BaseException) -> tuple[str, bool]:
    """Return why a request failed, and whether there was a connection: httpx hides why there was none in the cause."""
    import httpx

    if not isinstance(error, httpx.ConnectError):
        return f"{type(error).__name__}: {error}", True
    chain: list[BaseException] = []
    while error not in chain:  # causes can be circular
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    refused = any(isinstance(each, ConnectionRefusedError) for each in chain)
    return f"Cannot connect: {'connection refused' if refused else chain[-1]}", False


@cache
def _certificates() -> ssl.SSLContext:
    """Return the certificate authorities of this machine; reading them takes 20 ms."""
    import ssl

    return ssl.create_default_context()


def _retry_after(value: str) -> float | None:
    """Return the seconds of a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3)."""
    from email.utils import mktime_tz, parsedate_tz

    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_tz(value)
            seconds = mktime_tz(date) - time.time() if date else math.nan
        except (ValueError, OverflowError):  # there cannot be such a day
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
