"""The endpoint of a language model, with bounded concurrency and retries, and chat completions at temperature 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from harness1.config import Machine
from harness1.errors import ConfigError, InfrastructureFault, Overflow, Refusal, Unreachable, Unreadable
from harness1.http.chat_stream import ChatStream, Ended
from harness1.http.client import HttpClient, HttpFault, Transient, is_address, retry
from harness1.plain import utf8_safe, without_password
from harness1.records import Record

Answer = TypeVar("Answer")
Messages = list[dict[str, str]]


class Endpoint(Protocol):
    """What posts a body and decodes the answer as `kind`, as `ModelEndpoint` does; it raises a `HarnessError`. `ended`
    is given for a body that asks for a stream."""

    async def post(self, path: str, body: object, kind: type[Answer], ended: Ended | None = None) -> Answer: ...


class ChatRoute:
    """Asks for chat completions with the parameters that the server accepts. One that a refusal names is renamed
    (OpenAI's reasoning models take `max_tokens` only under its new name), or replaced or left out if it has its value
    in `free`; remembered once the server has answered, since a refusal may name one that is not at fault."""

    def __init__(self, endpoint: Endpoint, free: Mapping[str, Any], instead: Mapping[str, Any] | None = None) -> None:
        self._endpoint, self._free, self._instead = endpoint, free, instead or {}
        self._refused: frozenset[str] = frozenset()

    async def post(
        self, body: Mapping[str, Any], kind: type[Answer], ended: Ended | None = None
    ) -> tuple[Answer, dict[str, Any]]:
        """Return the answer and the body that led to it; raise `Refusal` only if no parameter can be dropped."""
        refused = self._refused
        free = [name for name, value in self._free.items() if name in body and body[name] == value]
        while True:
            sent = {name: value for name, value in body.items() if name not in free or name not in refused}
            sent |= {name: value for name, value in self._instead.items() if name in free and name in refused}
            if "max_tokens" in refused and "max_tokens" in sent:
                sent.setdefault("max_completion_tokens", sent.pop("max_tokens"))
            try:
                watched = [ended] if ended and sent.get("stream") else []
                answer = await self._endpoint.post("/chat/completions", sent, kind, *watched)
            except Refusal as refusal:
                said = str(refusal)
                named = [name for name in free if name not in refused and re.search(rf"\b{name}\b", said)]
                if "max_completion_tokens" in said and "max_tokens" in sent:
                    named = ["max_tokens"]
                if not named:
                    raise
                refused |= {named[0]}
            else:
                self._refused |= refused
                return answer, sent


class Completion(Record):
    """An answer of a model. Tokens are as its server counts them, None if it does not report them."""

    text: str
    finish_reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Completer:
    """Asks one model at an endpoint. `most_tokens` is the limit of an answer, including any reasoning before it."""

    def __init__(self, endpoint: Endpoint, model: str, most_tokens: int) -> None:
        self.model, self.most_tokens = model, most_tokens
        self._route = ChatRoute(endpoint, {"temperature": 0, "stream": True})

    async def complete(self, messages: Messages, ended: Ended | None = None) -> Completion:
        """Return the answer to a conversation; raise as the endpoint does. `ended`: is given the message as it grows,
        where the server streams, and ends it."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.most_tokens}
        answer, _ = await self._route.post(body | ({"stream": True} if ended else {}), _Completed, ended)
        choice, usage = answer.choices[0], answer.usage if isinstance(answer.usage, dict) else {}
        used = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        counts = [count if isinstance(count, int) else None for count in used]
        return Completion(choice.message.content or "", choice.finish_reason or "", *counts)


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completed(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: Any = None


def strip_answer(answer: str) -> str:
    """Return an answer without the reasoning before it and the code fence around it."""
    answer = answer.strip()
    if answer.startswith("<think>"):
        answer = answer.partition("</think>")[2].strip()
    if answer.startswith("```") and answer.endswith("```"):
        answer = answer[3:-3].removeprefix("json").strip()
    return answer


_OPENING = re.compile(r"<(?=[^\s\d=])|\[(?=/?[A-Z_]+\])")
_LOOK_ALIKE = {"<": "‹", "[": "［"}
_OPENED = str.maketrans({alike: opening for opening, alike in _LOOK_ALIKE.items()})


def defuse(text: str) -> str:
    """Return a text that can neither close tags around it nor hold control tokens: what opens them has look-alikes."""
    return _OPENING.sub(lambda found: _LOOK_ALIKE[found[0]], utf8_safe(text))


def restore(text: str) -> str:
    """Return a text with the look-alikes of `defuse` replaced by the original characters."""
    return text.translate(_OPENED)


LEAST_REQUESTS = 64  # requests to the model of a policy in flight in one process; more where more episodes are
REFUSALS = frozenset(range(300, 500)) - {408, 409, 429}
"""Statuses that a retry cannot change. A malformed answer has status 200 and is retried."""
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size|limit)|maximum model length|prompt is too long|input token count"
    r"|reduce the length of the messages|inputs`? tokens \+",
    re.I,
)
"""What servers say of a prompt that is longer than the context: OpenAI, vLLM, SGLang, llama.cpp, Anthropic, Gemini,
Groq and TGI, in this order of phrases."""

_ASKED_TOO_MUCH = re.compile(r"tokens'? is too large: (\d+).*?context length is (\d+)", re.S)
"""What vLLM says of `max_tokens`."""
_UNREADABLE = re.compile(
    r"failed to parse (input|tool call)|does not match the expected|could not finish the message because", re.I
)
"""What llama.cpp, with status 500, and OpenAI, with 400, say of an output that was cut off at `max_tokens`."""


def is_too_long(refusal: Refusal) -> bool:
    """Return whether a server refuses a call because prompt and output exceed its context."""
    return bool(_TOO_LONG.search(str(refusal)))


class ModelEndpoint:
    """The server of a language model, usable from any event loop: an address up to and including `/v1`, a bearer token,
    and limits for a loop. Raise ConfigError if URL or key are not usable, or both hold a secret."""

    def __init__(
        self,
        url: str,
        key: str = "",
        timeout_s: float = 60.0,
        attempts: int = 3,
        concurrency: int = 16,
        answer_bytes: int | None = None,
    ) -> None:
        key, shown = key.strip(), without_password(url)
        if not is_address(url):
            raise ConfigError(f"{shown!r} is not the address of a model: give http://HOST:PORT/v1")
        if key and shown != url:
            raise ConfigError(f"{shown}: give a key, or a user name and password in the address, not both")
        if not key.isprintable() or not key.isascii():
            raise ConfigError(f"{shown}: the key has characters that a header cannot contain")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = HttpClient(url.partition("#")[0].rstrip("/"), headers, concurrency, answer_bytes)
        self._timeout_s, self._attempts = timeout_s, attempts
        self._connected = False  # whether a request ever reached the server

    @property
    def url(self) -> str:
        """The address without its password."""
        return without_password(self.client.url)

    async def post(self, path: str, body: object, kind: type[Answer], ended: Ended | None = None) -> Answer:
        """Post a body (bytes count as JSON; None: get instead) and decode the answer as `kind` (`bytes`: as it is). An
        answer in a stream is ended, and its connection closed, when `ended` says so of the message so far. Raise
        Unreachable for a wrong key, model or address, or if no attempt ever reached the server; Overflow for a prompt
        longer than the context; Refusal for another permanent refusal; Unreadable if the server cannot read what its
        model wrote; InfrastructureFault if all attempts ended in no answer or a passing error."""
        sent = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)

        async def once() -> Answer:
            async with await self.client.turn():
                stream = ChatStream(ended) if ended else None
                answer = await self.client.ask(path, sent, kind, self._timeout_s, stream)
            if not isinstance(answer, HttpFault):
                self._connected = True
                return answer
            self._connected |= answer.connected
            if answer.status in (401, 403):
                raise Unreachable(f"{answer.message}; is the key right?", answer.status)
            if answer.status == 404:
                astray = path in ("/chat/completions", "/embeddings") and "/v1" not in self.url
                advice = "; the address must reach up to and including the /v1" if astray else ""
                raise Unreachable(answer.message + advice, answer.status)
            if answer.status in (400, 500) and _UNREADABLE.search(answer.message):
                raise Unreadable(answer.message)
            if answer.status in REFUSALS:
                # `max_tokens` that fill the context alone are a wrong setting, and no prompt that is too long.
                alone = (asked := _ASKED_TOO_MUCH.search(answer.message)) and int(asked[1]) >= int(asked[2])
                found = Refusal(answer.message, answer.status)
                raise Overflow(answer.message, answer.status) if is_too_long(found) and not alone else found
            raise Transient(answer.message, answer.retry_after_s)

        try:
            return await retry(once, self._attempts)
        except InfrastructureFault as fault:
            if self._connected:  # as it is after a refusal
                raise
            raise Unreachable(f"{fault}; is the server running, and is this its address?") from fault


def policy_endpoint(url: str, machine: Machine) -> ModelEndpoint:
    """Return the endpoint of a policy's model from the machine settings; raise as `ModelEndpoint` does."""
    at_once = max(LEAST_REQUESTS, machine.concurrency)
    return ModelEndpoint(url, machine.model.key, machine.model.timeout_s, machine.attempts, at_once)


def verifier_endpoint(url: str, machine: Machine) -> ModelEndpoint:
    """Return the endpoint of a judge's model, from `machine.verifier`; raise as `ModelEndpoint` does."""
    return ModelEndpoint(url, machine.verifier.key, machine.model.timeout_s, machine.attempts, machine.concurrency)
