"""Chat completions at temperature 0, shared by verifiers and answerers. Quoted texts are made inert first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from harness1.errors import Refusal
from harness1.plain import utf8_safe
from harness1.records import Record

Answer = TypeVar("Answer")
Messages = list[dict[str, str]]


class Endpoint(Protocol):
    """A server to post to: `harness1.http.model_endpoint.ModelEndpoint`, or a test's replacement."""

    async def post(self, path: str, body: object, kind: type[Answer]) -> Answer:
        """Post a body and decode the answer as `kind`; raise a `HarnessError` on failure."""
        ...


class ChatRoute:
    """Asks for chat completions with the parameters that the server accepts.

    OpenAI's reasoning models accept `max_tokens` only under its new name, and servers differ in what else they refuse.
    A parameter that a refusal names is renamed, replaced or left out. This is remembered only once the server has
    answered, because a refusal may name a parameter that is not at fault.

    Args:
        free: parameters that may be dropped, each with the only value at which it may.
        instead: replacements for some of them; the others are left out.
    """

    def __init__(self, endpoint: Endpoint, free: Mapping[str, Any], instead: Mapping[str, Any] | None = None) -> None:
        self._endpoint, self._free, self._instead = endpoint, free, instead or {}
        self._refused: frozenset[str] = frozenset()

    async def post(self, body: Mapping[str, Any], kind: type[Answer]) -> tuple[Answer, dict[str, Any]]:
        """Return the answer and the body that led to it; raise as the endpoint does, but `Refusal` only if no parameter
        can be dropped."""
        refused = self._refused
        while True:
            sent = self._adapted(body, refused)
            try:
                answer = await self._endpoint.post("/chat/completions", sent, kind)
            except Refusal as refusal:
                if (name := self._culprit(str(refusal), sent)) is None:
                    raise
                refused |= {name}
            else:
                self._refused |= refused
                return answer, sent

    def _adapted(self, body: Mapping[str, Any], refused: frozenset[str]) -> dict[str, Any]:
        sent = dict(body)
        for name in refused & self._droppable(body):
            if name in self._instead:
                sent[name] = self._instead[name]
            else:
                del sent[name]
        if "max_tokens" in refused and "max_tokens" in sent:
            sent.setdefault("max_completion_tokens", sent.pop("max_tokens"))
        return sent

    def _culprit(self, refusal: str, sent: Mapping[str, Any]) -> str | None:
        if "max_completion_tokens" in refusal and "max_tokens" in sent:
            return "max_tokens"
        free = self._droppable(sent)
        return next((name for name in self._free if name in free and re.search(rf"\b{name}\b", refusal)), None)

    def _droppable(self, body: Mapping[str, Any]) -> set[str]:
        return {name for name, value in self._free.items() if name in body and body[name] == value}


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
        self._route = ChatRoute(endpoint, {"temperature": 0})

    async def complete(self, messages: Messages) -> Completion:
        """Return the answer to a conversation; raise as the endpoint does."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.most_tokens}
        answer, _ = await self._route.post(body, _Answer)
        choice, usage = answer.choices[0], answer.usage if isinstance(answer.usage, dict) else {}
        used = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        counts = [count if isinstance(count, int) else None for count in used]
        return Completion(choice.message.content or "", choice.finish_reason or "", *counts)


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: Any = None


def bare(answer: str) -> str:
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


def inert(text: str) -> str:
    """Return a text that can neither close the tags around it nor contain a control token of a chat format: characters
    that could open one are replaced by look-alikes."""
    return _OPENING.sub(lambda found: _LOOK_ALIKE[found[0]], utf8_safe(text))


def opened(text: str) -> str:
    """Return a text with the look-alikes of `inert` replaced by the original characters."""
    return text.translate(_OPENED)
