"""Asking a model behind OpenAI's route for chat completions a question with one answer, at temperature 0: what judges
and answerers share. Texts by others are made inert before they are quoted."""

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
    """What is asked: `harness1.http.model_endpoint.ModelEndpoint`, or what a test puts in its place."""

    async def post(self, path: str, body: object, kind: type[Answer]) -> Answer:
        """Post a body and read the answer as a `kind`; what goes wrong is a `HarnessError`."""
        ...


class ChatRoute:
    """Asks for chat completions with the parameters that the server takes.

    OpenAI's reasoning models know `max_tokens` by its new name alone, and servers differ in what else they refuse. What
    a refusal names is said in another way, or left out, and that is remembered once the server has answered: a refusal
    may name what is not at fault.

    Args:
        free: parameters that may give way, each with the one value that may.
        instead: what some of them are replaced by; the others are left out.
    """

    def __init__(self, endpoint: Endpoint, free: Mapping[str, Any], instead: Mapping[str, Any] | None = None) -> None:
        self._endpoint, self._free, self._instead = endpoint, free, instead or {}
        self._refused: frozenset[str] = frozenset()

    async def post(self, body: Mapping[str, Any], kind: type[Answer]) -> tuple[Answer, dict[str, Any]]:
        """Return the answer, and the body as it was sent at last.

        Raises:
            HarnessError: as the endpoint; `Refusal` of what cannot give way.
        """
        refused = self._refused
        while True:
            sent = self._taken(body, refused)
            try:
                answer = await self._endpoint.post("/chat/completions", sent, kind)
            except Refusal as refusal:
                if (name := self._named(str(refusal), sent)) is None:
                    raise
                refused |= {name}
            else:
                self._refused |= refused
                return answer, sent

    def _taken(self, body: Mapping[str, Any], refused: frozenset[str]) -> dict[str, Any]:
        sent = dict(body)
        for name in refused & self._may_go(body):
            if name in self._instead:
                sent[name] = self._instead[name]
            else:
                del sent[name]
        if "max_tokens" in refused and "max_tokens" in sent:
            sent.setdefault("max_completion_tokens", sent.pop("max_tokens"))
        return sent

    def _named(self, refusal: str, sent: Mapping[str, Any]) -> str | None:
        if "max_completion_tokens" in refusal and "max_tokens" in sent:
            return "max_tokens"
        free = self._may_go(sent)
        return next((name for name in self._free if name in free and re.search(rf"\b{name}\b", refusal)), None)

    def _may_go(self, body: Mapping[str, Any]) -> set[str]:
        return {name for name, value in self._free.items() if name in body and body[name] == value}


class Completion(Record):
    """What a model said. Tokens are as its server counts them, None where it does not tell."""

    text: str
    finish_reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Completer:
    """Asks one model.

    Args:
        endpoint: bounds how many requests are in flight, and repeats those that failed.
        model: the name under which the endpoint knows the model.
        most_tokens: of an answer, with what a model thinks before it.
    """

    def __init__(self, endpoint: Endpoint, model: str, most_tokens: int) -> None:
        self.model, self.most_tokens = model, most_tokens
        self._route = ChatRoute(endpoint, {"temperature": 0})

    async def complete(self, messages: Messages) -> Completion:
        """Return the answer to a conversation.

        Raises:
            HarnessError: as the endpoint.
        """
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
    """An answer without the thoughts before it and the code fence around it."""
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
    """A text that cannot end the tags that it is put between, nor hold a control token of a chat format: what could
    open one is written by a character that looks alike."""
    return _OPENING.sub(lambda found: _LOOK_ALIKE[found[0]], utf8_safe(text))


def opened(text: str) -> str:
    """What a model repeats of an inert text, with the characters that stood there before."""
    return text.translate(_OPENED)
