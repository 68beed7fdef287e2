"""The server of a language model: bounded, patient, and clear about who has to mend what."""

from __future__ import annotations

import asyncio
import random
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from harness1.config import Machine
from harness1.errors import ConfigError, InfrastructureFault, Refusal, UsageError
from harness1.http.client import HttpClient, HttpFault
from harness1.redaction import without_password

REFUSALS = frozenset(range(300, 500)) - {408, 409, 429}
"""The statuses that no other try will change. An answer of another form than was asked for has 200, and is retried."""
MISCONFIGURED = frozenset({401, 403, 404})
"""Those of them that the user has to mend, and that every other request would meet, too."""
LONGEST_WAIT_S = 60.0
"""However long a server asks to wait."""

Answer = TypeVar("Answer")


class ModelEndpoint:
    """Posts to the server of a language model, from any event loop.

    Args:
        url: up to and including the `/v1`, where there is one.
        key: sent as a bearer token; empty: none is.
        timeout_s: for one try, from its start to the last byte.
        attempts: tries before a failure is a fault.
        backoff_s: waited before another try, times 2, 4, ... with jitter, and on top of what the server asks for.
        concurrency: requests in flight, on one event loop.

    Raises:
        ConfigError: the URL is none, or has a password beside the key.
        MissingExtra: aiohttp is not installed.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        timeout_s: float = 60.0,
        attempts: int = 3,
        backoff_s: float = 0.2,
        concurrency: int = 16,
    ) -> None:
        _check(url, key := key.strip())
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = HttpClient(url.rstrip("/"), headers, concurrency)
        self._timeout_s, self._attempts, self._backoff_s = timeout_s, attempts, backoff_s
        self._concurrency = concurrency
        self._gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    @property
    def url(self) -> str:
        """The address as it may be shown."""
        return without_password(self._client.url)

    async def post(self, path: str, body: object, kind: type[Answer]) -> Answer:
        """Post a body (bytes are JSON already) and read the answer as a `kind`.

        Raises:
            UsageError: a wrong key, model or address.
            Refusal: the server refuses this request for good.
            InfrastructureFault: no answer, an error of the server, too many requests, or an answer of another form,
                `attempts` times.
        """
        sent = body if isinstance(body, bytes) else msgspec.json.encode(body)
        gate, attempt = self._gate(), 0
        while True:
            attempt += 1
            async with gate:
                answer = await self._client.post(path, sent, kind, self._timeout_s)
            if not isinstance(answer, HttpFault):
                return answer
            if answer.status in MISCONFIGURED:
                raise UsageError(answer.message + self._advice(path, answer.status))
            if answer.status in REFUSALS:
                raise Refusal(answer.message, answer.status)
            if attempt >= self._attempts:
                raise InfrastructureFault(f"{answer.message} ({attempt} attempts)")
            await asyncio.sleep(self._wait_s(attempt, answer))

    def _advice(self, path: str, status: int) -> str:
        astray = status == 404 and path == "/chat/completions" and "/v1" not in self.url
        return "; the address must reach up to and including the /v1" if astray else ""

    def _gate(self) -> asyncio.Semaphore:
        """The gate of this event loop. A gate holds its loop, so that those of closed loops are let go by hand."""
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            for closed in [known for known in tuple(self._gates) if known.is_closed()]:
                self._gates.pop(closed, None)
            self._gates[loop] = asyncio.Semaphore(self._concurrency)
        return self._gates[loop]

    def _wait_s(self, attempt: int, fault: HttpFault) -> float:
        """Jitter is added to what the server asks for, too: its clients must not all come back at once."""
        backoff = self._backoff_s * 2.0**attempt * random.uniform(0.5, 1.0)
        return backoff + min(fault.retry_after_s or 0.0, LONGEST_WAIT_S)


def _check(url: str, key: str) -> None:
    shown = without_password(url)
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or (parts.port or 1) < 1
    except ValueError:
        wrong = True
    if wrong:
        raise ConfigError(f"{shown!r} is no address of a model: give http://HOST:PORT/v1")
    if key and shown != url:
        raise ConfigError(f"{shown}: give a key, or a user name and password in the address, not both")
    if not key.isprintable() or not key.isascii():
        raise ConfigError(f"{shown}: the key has characters that no header can carry")


def policy_endpoint(url: str, machine: Machine) -> ModelEndpoint:
    """The endpoint of a policy's model: asked as `machine.model` says, and again as often as everything is.

    Raises:
        ConfigError, MissingExtra: as `ModelEndpoint`.
    """
    return ModelEndpoint(
        url,
        machine.model.key,
        timeout_s=machine.model.timeout_s,
        attempts=machine.attempts,
        backoff_s=machine.backoff_s,
        concurrency=machine.model.concurrency,
    )
