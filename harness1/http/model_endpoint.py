"""The endpoint of a language model: bounded concurrency, and retries where they can help."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from harness1.config import Machine
from harness1.errors import ConfigError, InfrastructureFault, Overflow, Refusal, Unreachable
from harness1.http.client import HttpClient, HttpFault, is_address
from harness1.http.hosted import HostedClient
from harness1.http.retrying import Transient, retried
from harness1.redaction import without_password

REFUSALS = frozenset(range(300, 500)) - {408, 409, 429}
"""Statuses that a retry cannot change. A malformed answer has status 200 and is retried."""
MISCONFIGURED = frozenset({401, 403, 404})
"""Refusals that every request would meet, and that the user has to fix."""
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size|limit)|maximum model length|prompt is too long|input token count"
    r"|reduce the length of the messages|inputs`? tokens \+",
    re.I,
)
"""What servers say of a prompt that is longer than the context: OpenAI, vLLM, SGLang, llama.cpp, Anthropic, Gemini,
Groq and TGI, in this order of phrases."""

_ASKED_TOO_MUCH = re.compile(r"tokens'? is too large: (\d+).*?context length is (\d+)", re.S)
"""What vLLM says of `max_tokens`: where it alone fills the context, no prompt would fit."""

Answer = TypeVar("Answer")


class ModelEndpoint:
    """The server of a language model, usable from any event loop. Its `client` sends a request once, without retries.

    Args:
        url: address up to and including `/v1`, if it has one.
        key: bearer token; empty for none.
        timeout_s: limit of one try, to the last byte.
        attempts, backoff_s: as in `retried`.
        concurrency: requests in flight per event loop.

    Raises:
        ConfigError: the URL is not usable, or contains a password in addition to the key.
        MissingExtra: httpx is not installed, or openai if `kind` needs it.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        timeout_s: float = 60.0,
        attempts: int = 3,
        backoff_s: float = 0.2,
        concurrency: int = 16,
        kind: type[HttpClient] = HostedClient,
    ) -> None:
        _check(url, key := key.strip())
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = kind(url.rstrip("/"), headers, concurrency)
        self._timeout_s, self._attempts, self._backoff_s = timeout_s, attempts, backoff_s
        self._connected = False
        """Whether a request ever reached the server."""

    @property
    def url(self) -> str:
        """The address without its password."""
        return without_password(self.client.url)

    async def post(self, path: str, body: object, kind: type[Answer]) -> Answer:
        """Post a body (bytes count as JSON) and decode the answer as `kind`; `bytes` gives it as it is.

        Raises:
            Unreachable: a wrong key, model or address; or no attempt reached the server, now or ever before.
            Overflow: the prompt is longer than the model's context.
            Refusal: the server refuses this request permanently.
            InfrastructureFault: all `attempts` ended in no answer, a server error, a rate limit or a malformed answer.
        """
        sent = body if isinstance(body, bytes) else msgspec.json.encode(body)

        async def once() -> Answer:
            async with await self.client.turn():
                answer = await self.client.post(path, sent, kind, self._timeout_s)
            if not isinstance(answer, HttpFault):
                self._connected = True
                return answer
            self._connected |= answer.connected
            if answer.status in MISCONFIGURED:
                raise Unreachable(answer.message + self._advice(path, answer.status), answer.status)
            if answer.status in REFUSALS:
                refusal = Overflow if _is_too_long(answer.message) else Refusal
                raise refusal(answer.message, answer.status)
            raise Transient(answer.message, answer.retry_after_s)

        try:
            return await retried(once, self._attempts, self._backoff_s)
        except InfrastructureFault as fault:
            if self._connected:  # as it is after a refusal
                raise
            raise Unreachable(f"{fault}; is the server running, and is this its address?") from fault

    def _advice(self, path: str, status: int) -> str:
        if status in (401, 403):
            return "; is the key right?"
        astray = status == 404 and path == "/chat/completions" and "/v1" not in self.url
        return "; the address must reach up to and including the /v1" if astray else ""


def _check(url: str, key: str) -> None:
    shown = without_password(url)
    if not is_address(url):
        raise ConfigError(f"{shown!r} is not the address of a model: give http://HOST:PORT/v1")
    if key and shown != url:
        raise ConfigError(f"{shown}: give a key, or a user name and password in the address, not both")
    if not key.isprintable() or not key.isascii():
        raise ConfigError(f"{shown}: the key has characters that a header cannot contain")


def policy_endpoint(url: str, machine: Machine, kind: type[HttpClient] = HostedClient) -> ModelEndpoint:
    """Return the endpoint of a policy's model from the machine settings; raise as `ModelEndpoint` does."""
    return ModelEndpoint(
        url,
        machine.model.key,
        timeout_s=machine.model.timeout_s,
        attempts=machine.attempts,
        backoff_s=machine.backoff_s,
        concurrency=machine.model.concurrency,
        kind=kind,
    )


def verifier_endpoint(url: str, machine: Machine) -> ModelEndpoint:
    """Return the endpoint of a judge's model, with key, deadline and concurrency of `machine.verifier`; raise as
    `ModelEndpoint` does."""
    judge = machine.verifier
    return ModelEndpoint(url, judge.key, judge.timeout_s, machine.attempts, machine.backoff_s, judge.concurrency)


def _is_too_long(message: str) -> bool:
    """Return whether a server refused a prompt for its length, which is the policy's doing."""
    asked = _ASKED_TOO_MUCH.search(message)
    return bool(_TOO_LONG.search(message)) and not (asked and int(asked[1]) >= int(asked[2]))
