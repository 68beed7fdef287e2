"""A chat call without a provider: what an agent asks and what it is answered, whichever client it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from harness1.models.formats.reading import read_object
from harness1.plain import json_safe
from harness1.records import Record
from harness1.serve.service import Refused
from harness1.tools.tool import ToolSpec

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1)]
"""0 and -1: no bound."""
Tokens = Annotated[int, Meta(ge=1, le=1 << 31)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Finish = Literal["stop", "length", "tool_calls"]

Body = TypeVar("Body")

VERBATIM = ("input", "parameters", "input_schema")
"""Where a null is a value: the arguments of a call, and schemas."""


class Called(Record):
    """A call of a tool; `arguments` is JSON as it was written, which need not be valid."""

    call_id: str
    name: str
    arguments: str = "{}"

    def meaning(self) -> dict[str, Any]:
        """The arguments as values; what is no JSON object stands under the name `arguments`."""
        found = read_object(self.arguments or "{}")
        values: dict[str, Any] = json_safe({"arguments": self.arguments} if found is None else found)
        return values


class ChatMessage(Record):
    """One message; of role `tool`, `answers` is the id of the call that it answers."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    calls: tuple[Called, ...] = ()
    answers: str = ""


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that requests of all providers share. Where one is None, the proxy's configuration decides."""

    model: str = ""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    max_tokens: Tokens | None = None
    seed: Seed | None = None
    """Anthropic has none: its clients give it as `extra_body`."""
    stream: bool = False

    def shared(self) -> dict[str, Any]:
        """Return the shared parameters by name."""
        return {name: getattr(self, name) for name in Parameters.__struct_fields__}


class ChatRequest(Parameters, frozen=True, kw_only=True):
    """A request, whoever's client it came from."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    must_call: bool = False
    """Advice: a chat server may heed it; a model that is asked by ids may answer in words all the same."""
    one_call: bool = False
    stream_usage: bool = False
    """Whether a stream ends with the usage; Anthropic's always has it."""
    token_ids: bool = False
    """Whether the reply tells its tokens."""


class Spelled(Record):
    """A prompt and its output by their tokens; None where log probabilities are not known."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...] | None


class ChatReply(Record, kw_only=True):
    """What the model answered. `reasoning` is only what a server gives apart from the text."""

    call_id: str
    model: str = ""
    """As the client called it."""
    created: int = 0
    """Seconds since 1970."""
    text: str = ""
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    finish: Finish = "stop"
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens: Spelled | None = None
    """Where the client asked for them."""


def decoded(body: bytes) -> dict[str, Any]:
    """A body as an object, without what is null.

    Raises:
        Refused: it is none.
    """
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON object: {error}") from error
    return {name: value for name, value in found.items() if value is not None}


def converted(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """A body as a provider's request; what is null was not said.

    Raises:
        Refused: it is none.
    """
    try:
        return msgspec.convert(_without_nulls(body), kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Refused(400, str(error)) from error


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse what would change the distribution and cannot be done here.

    Args:
        neutral: for each such parameter the values that change nothing.

    Raises:
        Refused: a parameter has another value.
    """
    if names := changing(body, neutral):
        raise Refused(400, f"{', '.join(names)}: not supported here with this value: leave it out")


def changing(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """The names of what has another value than those that change nothing."""
    return [name for name, values in neutral.items() if name in body and body[name] not in values]


def spec_of(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> ToolSpec:
    """A declared tool.

    Raises:
        Refused: its parameters are no JSON schema of an object.
    """
    schema = dict(parameters or {"type": "object", "properties": {}})
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        raise Refused(400, f"the parameters of the tool {name!r} are no JSON schema of an object")
    return ToolSpec(name, description or "", schema)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        known = {name: each for name, each in value.items() if each is not None}
        return {name: each if name in VERBATIM else _without_nulls(each) for name, each in known.items()}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
