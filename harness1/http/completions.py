"""Asking a model behind OpenAI's route for chat completions a question with one answer, at temperature 0: what judges
and answerers share. Texts by others are made inert before they are quoted."""

from __future__ import annotations

import re
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
        self._endpoint, self.model, self.most_tokens = endpoint, model, most_tokens
        self._options: dict[str, int] = {"temperature": 0, "max_tokens": most_tokens}

    @property
    def options(self) -> dict[str, int]:
        """What is sent beside the messages, as far as the server takes it."""
        return dict(self._options)

    async def complete(self, messages: Messages) -> Completion:
        """Ask. Some models of OpenAI know the limit by its new name alone, and take no temperature.

        Raises:
            HarnessError: as the endpoint.
        """
        while True:
            options = self._options
            body = {"model": self.model, "messages": messages, **options}
            try:
                return _completion(await self._endpoint.post("/chat/completions", body, _Answer))
            except Refusal as refusal:
                instead: dict[str, int] = {}
                if "max_completion_tokens" in str(refusal) and "max_tokens" in options:
                    refused, instead = "max_tokens", {"max_completion_tokens": self.most_tokens}
                elif "temperature" in str(refusal) and "temperature" in options:
                    refused = "temperature"
                else:
                    raise
                self._options = {name: value for name, value in options.items() if name != refused} | instead


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: Any = None


def _completion(answer: _Answer) -> Completion:
    choice, usage = answer.choices[0], answer.usage if isinstance(answer.usage, dict) else {}
    used = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    counts = [count if isinstance(count, int) else None for count in used]
    return Completion(choice.message.content or "", choice.finish_reason or "", *counts)


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
