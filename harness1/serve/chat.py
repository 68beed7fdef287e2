"""Chats in no provider's form: requests, replies, what reads and writes them, and messages as token ids."""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from threading import Lock
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from harness1.env.pieces import Piece, Role
from harness1.env.view import TurnView
from harness1.models.calls import read_object
from harness1.models.chat_format import ChatFormat, Ids
from harness1.models.formats import CHANNEL, MESSAGE, RETURN
from harness1.plain import digest, json_safe, text_digest
from harness1.records import ModelCall, Record, ToolCall
from harness1.serve.service import Refused
from harness1.tools.tool import ToolSpec

Tokens = Annotated[int, Meta(ge=1, le=1 << 31)]
Body = TypeVar("Body")

VERBATIM = ("input", "parameters", "input_schema")
"""Keys whose content is kept with its nulls: the arguments of a call, and schemas."""
TEXTS = ("text", "input_text", "output_text", "refusal")

MOST_PARTS = 1 << 17
"""Parts of a body, of which a message has seven and a call of a tool twelve: they are read in half a second at most."""
_PARTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*+"?|[,\[{]', re.DOTALL)
MOST, LONGEST = 50, 1000  # parameters of a call that are recorded, and bytes of each: of a longer one the beginning
TOO_LONG = "prompt is too long"
"""The words by which agents know that they must shorten a conversation, as Anthropic says them."""
STOPS_ALONE = "an output ends with the model's own stop token"


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
    """The parameters of all providers; None: as the proxy is configured."""

    model: str = ""
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # 0 and -1: no bound
    max_tokens: Tokens | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None  # clients of some APIs send it as `extra_body`
    stream: bool = False

    def common(self) -> dict[str, Any]:
        """Return the shared parameters by name."""
        return {name: getattr(self, name) for name in Parameters.__struct_fields__}


class ChatRequest(Parameters, frozen=True, kw_only=True):
    """A request from a client of any provider."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    must_call: bool = False
    """Require a call. A chat server may enforce it; a model sampled by ids may still answer in text."""
    one_call: bool = False
    unmet: dict[str, Any] = {}
    """What the client asks for that nobody here does, by name."""
    stream_usage: bool = False  # report usage at the end of a stream. Anthropic's streams always do.

    def characters(self) -> int:
        """Return the length of the messages and the tools together."""
        texts = [message.text for message in self.messages]
        texts += [call.name + call.arguments for message in self.messages for call in message.calls]
        return sum(map(len, texts)) + len(msgspec.json.encode(self.tools))


class ChatReply(Record, kw_only=True):
    """The answer of a model; `reasoning` is set if a server returns it apart."""

    call_id: str
    model: str = ""  # the name that the client gave
    created: int = 0  # seconds since 1970
    text: str = ""
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    finish: Literal["stop", "length", "tool_calls"] = "stop"
    prompt_tokens: int = 0
    output_tokens: int = 0


class Part(msgspec.Struct):
    """A part of the content of a message: a text, or what no text model reads."""

    type: str
    text: str | None = None
    refusal: str | None = None


def join_texts(content: str | Sequence[Part] | None) -> str:
    """Return the text of a message's content; raise Refused if a part is none."""
    if content is None or isinstance(content, str):
        return content or ""
    if other := next((part.type for part in content if part.type not in TEXTS), None):
        raise Refused(400, f"a part of type {other!r} cannot be read: this model takes text only")
    return "\n".join(part.text or part.refusal or "" for part in content)


def decode_body(body: bytes) -> dict[str, Any]:
    """Decode a body as an object and drop its nulls; raise Refused if the body is not a JSON object, or has so many
    parts that reading it would keep other clients waiting."""
    if next(islice(_PARTS.finditer(body), MOST_PARTS, None), None):
        raise Refused(400, f"the body has more than {MOST_PARTS:,} strings, commas and brackets")
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not a JSON object: {error}") from error
    return {name: value for name, value in found.items() if value is not None}


def convert_body(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Convert a body to a provider's request; a null counts as missing. Raise Refused if it is not such a request."""
    try:
        return msgspec.convert(_without_nulls(body), kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Refused(400, str(error)) from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        known = {name: each for name, each in value.items() if each is not None}
        return {name: each if name in VERBATIM else _without_nulls(each) for name, each in known.items()}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


Fields = Mapping[str, tuple[Any, ...]]
"""The parameters of a provider that are refused: by name the reason, and the values with which they ask for nothing."""


def refuse_fields(body: Mapping[str, Any], fields: Fields) -> None:
    """Raise Refused if a parameter asks for what is refused."""
    if asked := [f"{name}: {fields[name][0]}" for name in changing(body, fields)]:
        raise Refused(400, f"{'; '.join(asked)}: leave it out")


def changing(body: Mapping[str, Any], fields: Fields) -> list[str]:
    """Return the names of the parameters that ask for something."""
    return [name for name, (_, *neutral) in fields.items() if name in body and body[name] not in neutral]


def unmet_by(
    body: Mapping[str, Any], honoured: Collection[str], fields: Fields, tools: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what a body asks for that nobody here does, by name, for the record; `tools` are not offered."""
    done = {*honoured, *fields} - {*changing(body, fields)}
    asked = (each for each in body.items() if each[0] not in done and each[1] not in ("", [], {}))
    found = {name[:LONGEST]: _shorten(value) for name, value in islice(asked, MOST)}
    return found | ({"tools": _shorten(tools)} if tools else {})


def _shorten(value: Any) -> Any:
    text = msgspec.json.encode(value)
    return value if len(text) <= LONGEST else f"{text[:LONGEST].decode(errors='replace')}..."


def spec_of(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> ToolSpec:
    """Return a declared tool; raise Refused if its parameters are not a JSON schema of an object."""
    schema = dict(parameters or {"type": "object", "properties": {}})
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        raise Refused(400, f"the parameters of the tool {name!r} are not a JSON schema of an object")
    return ToolSpec(name, description or "", schema)


def choose_tools(specs: Sequence[ToolSpec], choice: str, name: str = "") -> dict[str, Any]:
    """Return the `tools` and `must_call` of a request by its choice: `none`, `required`, `named`, by which that tool
    alone is offered, or another, which changes nothing. Raise Refused if no tool has the name."""
    if choice == "named" and not (specs := [spec for spec in specs if spec.name == name]):
        raise Refused(400, f"tool_choice names {name!r}, which is none of the tools")
    return {"tools": tuple(specs) if choice != "none" else (), "must_call": choice in ("required", "named")}


Event = tuple[str, dict[str, Any]]  # name (or "") and data of an event of a stream


class Dialect(NamedTuple):
    """The API of one provider: `read` raises Refused, and `events` returns a reply as a stream, ended by `last`."""

    name: str
    fields: Fields
    read: Callable[[Mapping[str, Any]], ChatRequest]
    write: Callable[[ChatReply], dict[str, Any]]
    events: Callable[[ChatReply, bool], list[Event]]
    error: Callable[[int, str], dict[str, Any]]
    last: str = ""

    def stream(self, reply: ChatReply, usage: bool) -> bytes:
        """Return a reply as server-sent events (HTML standard, 9.2)."""
        lines = [
            (f"event: {name}\n" if name else "") + f"data: {msgspec.json.encode(data).decode()}\n\n"
            for name, data in self.events(reply, usage)
        ]
        return "".join([*lines, self.last]).encode()


def extend_past(past: str, message: ChatMessage) -> str:
    """Return the digest of the messages before and of one more, without what clients rewrite; "" is for no messages."""
    ids = [call.call_id for call in message.calls]
    return digest([past, message.role, message.text.strip(), ids, message.answers])


class _Said(NamedTuple):
    session: str
    text: str
    calls: list[tuple[str, str, object]]
    ids: array[int]


class Memory:
    """Sampled tokens, so that messages that come back as history are not tokenised again: in RAM only, safe to share
    between threads, and bounded in outputs (a text counts twice) and token ids; the least recently used go first."""

    def __init__(self, outputs: int = 400_000, ids: int = 50_000_000) -> None:
        self._most_outputs, self._most_ids = outputs, ids
        self._said: OrderedDict[str, _Said] = OrderedDict()
        self._ids = 0
        self._lock = Lock()

    def owner(self, messages: Sequence[ChatMessage]) -> str | None:
        """Return the session of the latest known call in the messages."""
        keys = (_call_key(message.calls) for message in reversed(messages) if message.calls)
        return next((found.session for key in keys if (found := self._said.get(key))), None)

    def remember(self, session: str, past: str, reply: ChatReply, output_ids: Sequence[int]) -> None:
        """Remember an answer by the ids of its calls, which are unique, or by its past and text."""
        said = _Said(session, reply.text.strip(), _meaning_of(reply.calls), array("i", output_ids))
        with self._lock:
            for key in [_call_key(reply.calls)] if reply.calls else _text_keys(session, past, said.text):
                if (before := self._said.pop(key, None)) is not None:
                    self._ids -= len(before.ids)
                self._said[key] = said
                self._ids += len(said.ids)
            while len(self._said) > self._most_outputs or self._ids > self._most_ids:
                _, forgotten = self._said.popitem(last=False)
                self._ids -= len(forgotten.ids)

    def recall(self, session: str, past: str, message: ChatMessage) -> Ids | None:
        """Return the sampled ids of a message, by its past, or anywhere in the session; None if it was edited."""
        text = message.text.strip()
        keys = [_call_key(message.calls)] if message.calls else _text_keys(session, past, text)
        with self._lock:
            key = next((key for key in keys if key in self._said), None)
            if key is None:
                return None
            self._said.move_to_end(key)
            said = self._said[key]
        if message.calls and (said.calls != _meaning_of(message.calls) or text not in ("", said.text)):
            return None
        return tuple(said.ids)


def _call_key(calls: Sequence[Called]) -> str:
    return f"call/{calls[0].call_id}"


def _text_keys(session: str, past: str, text: str) -> list[str]:
    return [f"at/{session}/{past}/{digest(text)}", f"text/{session}/{digest(text)}"]


def _meaning_of(calls: Sequence[Called]) -> list[tuple[str, str, object]]:
    return [(call.call_id, call.name, call.meaning()) for call in calls]


Recall = Callable[[str, ChatMessage], Ids | None]
"""Looks up the sampled ids of an assistant's message by its past; None if it was not sampled here."""


def prompt_of(
    chat: ChatFormat, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], recall: Recall
) -> tuple[Ids, str]:
    """Return the ids of a call's prompt, and the past of its output. The leading system messages are joined into one,
    which is there even if empty because it declares the tools; later ones become user messages."""
    leading = list(takewhile(lambda message: message.role == "system", messages))
    groups = [[_piece("system", "\n".join(message.text for message in leading))]]
    past = ""
    names: dict[str, str] = {}
    for place, message in enumerate(messages):
        if place >= len(leading):
            groups += ([piece] for piece in _pieces(chat, message, names, past, recall))
        names |= {call.call_id: call.name for call in message.calls}
        past = extend_past(past, message)
    segments = [*chat.messages(groups, tools), chat.prompt_end()]
    return tuple(token for segment in segments for token in segment.ids), past


def text_of_output(chat: ChatFormat, output_ids: Sequence[int]) -> str:
    """Return the text of an output without calls; in Harmony, that of its last message."""
    ids = list(output_ids)
    while ids and ids[-1] in chat.stop_ids:
        ids.pop()
    message = chat.tokenizer.control.get(MESSAGE)
    if message in ids:
        ids = ids[len(ids) - ids[::-1].index(message) :]
    return chat.tokenizer.decode(ids)


def _pieces(
    chat: ChatFormat, message: ChatMessage, names: dict[str, str], past: str, recall: Recall
) -> Iterator[Piece]:
    match message.role:
        case "system" | "user":
            yield _piece("user", message.text)
        case "tool":
            yield _piece("tool", message.text, TurnView(turn=0, tool=names.get(message.answers, "")))
        case "assistant":
            sampled = recall(past, message)
            for ids in _write_ids(chat, message) if sampled is None else [sampled]:
                yield Piece(f"said#{text_digest(message.text)}", "assistant", "", 0, call=ModelCall("", output_ids=ids))


def _piece(role: Role, text: str, shows: Record | None = None) -> Piece:
    """Return a piece, keyed by its role too, whose text ends with a line break: a format may write more after it."""
    closed = f"{text}\n" if text and not text.endswith("\n") and role != "user" else text
    return Piece(f"{role}#{text_digest(closed)}", role, closed, shows=shows)


def _write_ids(chat: ChatFormat, message: ChatMessage) -> Iterator[Ids]:
    """Yield a message that was not sampled here as outputs, one for each call, since no format writes several."""
    text = message.text
    if not message.calls:
        final = CHANNEL in chat.tokenizer.control
        head, tail = (f"{CHANNEL}final{MESSAGE}", RETURN) if final else ("", "")
        yield (*chat.write(head), *chat.text(text), *(chat.write(tail) or chat.stop_ids[:1]))
    for call in message.calls:
        yield chat.format_action(text, ToolCall(call.name, call.meaning()))
        text = ""
