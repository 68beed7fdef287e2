"""Chat requests and replies, independent of the provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from harness1.models.calls import read_object
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
"""Keys whose content is kept with its nulls: the arguments of a call, and schemas."""


class Called(Record):
    """A tool call; `arguments` is the JSON as the model wrote it, valid or not."""

    call_id: str
    name: str
    arguments: str = "{}"

    def meaning(self) -> dict[str, Any]:
        """Return the parsed arguments; if they are not a JSON object, their text under the key `arguments`."""
        found = read_object(self.arguments or "{}")
        values: dict[str, Any] = json_safe({"arguments": self.arguments} if found is None else found)
        return values


class ChatMessage(Record):
    """A message. With role `tool`, `answers` is the id of the answered call."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    calls: tuple[Called, ...] = ()
    answers: str = ""


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of all providers. The proxy's configuration replaces those that are None."""

    model: str = ""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    max_tokens: Tokens | None = None
    seed: Seed | None = None
    """Not part of Anthropic's API: its clients send it as `extra_body`."""
    stream: bool = False

    def shared(self) -> dict[str, Any]:
        """Return the shared parameters by name."""
        return {name: getattr(self, name) for name in Parameters.__struct_fields__}


class ChatRequest(Parameters, frozen=True, kw_only=True):
    """A request from a client of either provider."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    must_call: bool = False
    """Require a call. A chat server may enforce it; a model sampled by ids may still answer in text."""
    one_call: bool = False
    stream_usage: bool = False
    """Report usage at the end of a stream. Anthropic's streams always do."""
    token_ids: bool = False
    """Include the tokens in the reply."""

    def characters(self) -> int:
        """Return the length of the messages and the tools together."""
        texts = [message.text for message in self.messages]
        texts += [call.name + call.arguments for message in self.messages for call in message.calls]
        return sum(map(len, texts)) + len(msgspec.json.encode(self.tools))


class Spelled(Record):
    """The tokens of a prompt and its output; log probabilities may be unknown."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...] | None


class ChatReply(Record, kw_only=True):
    """The answer of a model. `reasoning` is only set if a server returns it separately from the text."""

    call_id: str
    model: str = ""
    """The name that the client gave."""
    created: int = 0
    """Seconds since 1970."""
    text: str = ""
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    finish: Finish = "stop"
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens: Spelled | None = None
    """Set if the client asked for them."""


def decoded(body: bytes) -> dict[str, Any]:
    """Decode a body as an object and drop its nulls; raise Refused if the body is not a JSON object."""
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not a JSON object: {error}") from error
    return {name: value for name, value in found.items() if value is not None}


def converted(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Convert a body to a provider's request; a null counts as missing. Raise Refused if the body is not such a
    request."""
    try:
        return msgspec.convert(_without_nulls(body), kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Refused(400, str(error)) from error


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse unsupported parameters, unless they have a value in `neutral`, which changes nothing; raise Refused if a
    parameter has another value."""
    if names := changing(body, neutral):
        raise Refused(400, f"{', '.join(names)}: not supported here with this value: leave it out")


def changing(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the names of parameters whose values would change the distribution."""
    return [name for name, values in neutral.items() if name in body and body[name] not in values]


def spec_of(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> ToolSpec:
    """Return a declared tool; raise Refused if its parameters are not a JSON schema of an object."""
    schema = dict(parameters or {"type": "object", "properties": {}})
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        raise Refused(400, f"the parameters of the tool {name!r} are not a JSON schema of an object")
    return ToolSpec(name, description or "", schema)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        known = {name: each for name, each in value.items() if each is not None}
        return {name: each if name in VERBATIM else _without_nulls(each) for name, each in known.items()}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
