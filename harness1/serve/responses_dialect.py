"""Read and write OpenAI's Responses (https://platform.openai.com/docs/api-reference/responses). Items and events are
those of `openai.types.responses` in OpenAI's Python client; what Codex reads of them is in `codex-rs/codex-api`,
`src/sse/responses.rs`, and what it sends in `src/common.rs` there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from harness1.serve import chat
from harness1.serve.openai_dialect import FIELDS as OPENAI_FIELDS
from harness1.serve.openai_dialect import choice_of, error, honoured
from harness1.serve.service import Refused

CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
THOUGHTS = ("reasoning", "compaction")  # items in which another model thought; they are not shown to this one
LONGEST = 32 << 20  # bytes of the items of a conversation, as of a body


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[chat.Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[chat.Part] | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Request(chat.Parameters, frozen=True, kw_only=True):
    input: str | list[_Item]
    instructions: str = ""
    tools: list[_Tool] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: chat.Tokens | None = None
    store: bool = True
    previous_response_id: str = ""


FIELDS: chat.Fields = {
    **OPENAI_FIELDS,
    "conversation": ("continue by previous_response_id, or send the whole input", ""),
    "background": ("an answer comes on the connection that asks for it", False),
    "prompt": ("no prompts are stored here",),
}


def read(body: Mapping[str, Any]) -> chat.ChatRequest:
    """Read a request that holds its whole conversation (`Responses.expand`); raise Refused if it is none, or has parts
    other than text. Only functions are offered."""
    asked = chat.convert_body(body, _Request)
    items = [_Item(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
    messages = list(_messages(items))
    if not messages:
        raise Refused(400, "there are no messages")
    if asked.instructions:
        messages.insert(0, chat.ChatMessage("system", asked.instructions))
    functions = [tool for tool in asked.tools if tool.type == "function"]
    others = [f"{tool.type} {tool.name}".strip() for tool in asked.tools if tool.type != "function"]
    specs = [chat.spec_of(tool.name, tool.description, tool.parameters) for tool in functions]
    choice, name = choice_of(asked.tool_choice)
    return chat.ChatRequest(
        messages=tuple(messages),
        **chat.choose_tools(specs, choice, name),
        one_call=not asked.parallel_tool_calls,
        unmet=chat.unmet_by(body, honoured(_Request, choice), FIELDS, others),
        **asked.common() | {"max_tokens": asked.max_output_tokens or asked.max_tokens},
    )


def write(reply: chat.ChatReply) -> dict[str, Any]:
    """Return a reply as one response."""
    cut = reply.finish == "length"
    found = _head(reply, "incomplete" if cut else "completed")
    details = {"reason": "max_output_tokens"} if cut else None
    counts = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.output_tokens}
    usage = counts | {
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": sum(counts.values()),
    }
    return found | {"output": output_of(reply), "incomplete_details": details, "usage": usage}


def output_of(reply: chat.ChatReply) -> list[dict[str, Any]]:
    """Return the items of a reply: what it thought, its text, and its calls."""
    status = "incomplete" if reply.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        items.append({"id": f"rs_{reply.call_id}", "type": "reasoning", "summary": [], "content": [thought]})
    if reply.text or not reply.calls:
        said = {"id": f"msg_{reply.call_id}", "type": "message", "role": "assistant", "status": status}
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        items.append(said | {"content": [text]})
    for place, call in enumerate(reply.calls):
        named = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        items.append({"id": f"fc_{reply.call_id}_{place}", "type": "function_call", "status": "completed", **named})
    return items


def events(reply: chat.ChatReply, usage: bool) -> list[chat.Event]:
    """Return a reply as a stream: each item is announced, filled and closed, and the whole response ends it."""
    whole = write(reply)
    begun = _head(reply, "in_progress")
    found: list[tuple[str, dict[str, Any]]] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        shown = {**item, **empty} | ({"status": "in_progress"} if "status" in item else {})
        found.append(("output_item.added", {**place, "item": shown}))
        found += _filling(item, {"item_id": item["id"], **place})
        found.append(("output_item.done", {**place, "item": item}))
    found.append((whole["status"], {"response": whole}))
    return [
        (f"response.{name}", {"type": f"response.{name}", "sequence_number": number, **data})
        for number, (name, data) in enumerate(found)
    ]


RESPONSES = chat.Dialect("responses", FIELDS, read, write, events, error)


class _Kept(NamedTuple):
    session: str
    before: str  # the id of the response that it continues
    given: list[bytes]  # the items of its input
    answer: dict[str, bytes]  # those of its output, by id

    def items(self) -> list[bytes]:
        return [*self.given, *self.answer.values()]


class Responses:
    """Responses that later requests of their session continue (`previous_response_id`) or refer to (`item_reference`):
    in RAM only, bounded in number and bytes; the least recently used go first."""

    def __init__(self, most: int = 100_000, most_bytes: int = 256 << 20) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def owner(self, body: Mapping[str, Any]) -> str | None:
        """Return the session of a response that a body continues or refers to."""
        names = [body.get("previous_response_id"), *filter(None, map(_reference, _items_of(body)))]
        return next((kept.session for name in names if (kept := self._kept.get(_response_of(name)))), None)

    def expand(self, body: dict[str, Any], session: str) -> tuple[dict[str, Any], list[bytes]]:
        """Return a body with all items of its conversation as input, and the encoded items that it adds. Raise Refused
        if the session does not have, any more, what it continues or refers to, or the conversation is too long."""
        given = [self._encode(item, session) for item in _items_of(body)]
        before, parts = body.get("previous_response_id"), [given]
        while before:
            kept = self._find(str(before), str(before), session)
            parts.append(kept.items())
            before = kept.before
        items = [item for part in reversed(parts) for item in part]
        if sum(map(len, items)) > LONGEST:
            raise Refused(400, f"{chat.TOO_LONG}: more than {LONGEST} bytes of items")
        return body | chat.decode_body(b'{"input":[%s]}' % b",".join(items)), given

    def keep(self, body: Mapping[str, Any], given: list[bytes], session: str, reply: chat.ChatReply) -> None:
        """Keep a response with the items that its body added, unless it will not be continued (`store`)."""
        if body.get("store") is False:
            return
        answer = {item["id"]: msgspec.json.encode(item) for item in output_of(reply)}
        kept = _Kept(session, body.get("previous_response_id", ""), given, answer)
        self._kept[f"resp_{reply.call_id}"] = kept
        self._bytes += sum(map(len, kept.items()))
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, forgotten = self._kept.popitem(last=False)
            self._bytes -= sum(map(len, forgotten.items()))

    def _encode(self, item: Any, session: str) -> bytes:
        if not (named := _reference(item)):
            return msgspec.json.encode(item)
        if found := self._find(_response_of(named), named, session).answer.get(named):
            return found
        raise Refused(400, f"{named[:100]!r}: this session has no such item")

    def _find(self, response: str, named: str, session: str) -> _Kept:
        kept = self._kept.get(response)
        if kept is None or kept.session != session:
            raise Refused(400, f"{named[:100]!r}: this session has no such response or item (any more)")
        self._kept.move_to_end(response)
        return kept


def _items_of(body: Mapping[str, Any]) -> list[Any]:
    given = body.get("input", [])
    if isinstance(given, list):
        return given
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    raise Refused(400, "the input is neither a text nor a list of items")


def _reference(item: Any) -> str:
    """Return the id that an item refers to; "" if it is the item itself."""
    return str(item.get("id")) if isinstance(item, dict) and item.get("type") == "item_reference" else ""


def _response_of(name: Any) -> str:
    """Return the id of the response with that id, or with an item of that id: they have the same middle."""
    return "_".join(["resp", *str(name).split("_")[1:2]])


def _messages(items: Sequence[_Item]) -> Iterator[chat.ChatMessage]:
    """Yield the messages of a conversation. An answer is several items: a text, and the calls that follow it."""
    said: chat.ChatMessage | None = None
    for item in items:
        if item.type in CALLS:
            given = item.arguments or "{}"
            if item.type == "custom_tool_call":
                given = msgspec.json.encode({"input": item.input or ""}).decode()
            said = said or chat.ChatMessage("assistant")
            call = chat.Called(item.call_id or "", item.name or "", given)
            said = msgspec.structs.replace(said, calls=(*said.calls, call))
            continue
        if item.type in THOUGHTS:
            continue
        if said:
            yield said
        said = None
        if item.type in RESULTS:
            yield chat.ChatMessage("tool", chat.join_texts(item.output), answers=item.call_id or "")
        elif item.type == "message" and item.role == "assistant":
            said = chat.ChatMessage("assistant", chat.join_texts(item.content))
        elif item.type == "message" and item.role in ("user", "system", "developer"):
            yield chat.ChatMessage("user" if item.role == "user" else "system", chat.join_texts(item.content))
        else:
            kind = f"a message of role {item.role!r}" if item.type == "message" else f"an item of type {item.type!r}"
            raise Refused(400, f"{kind} cannot be read here")
    if said:
        yield said


def _filling(item: Mapping[str, Any], place: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {**place, "delta": item["arguments"]}
        yield "function_call_arguments.done", {**place, "arguments": item["arguments"]}
        return
    (part,) = item["content"]
    place, text = {**place, "content_index": 0}, part["text"]
    name = part["type"]
    more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
    yield "content_part.added", {**place, "part": {**part, "text": ""}}
    yield f"{name}.delta", {**place, "delta": text, **more}
    yield f"{name}.done", {**place, "text": text, **more}
    yield "content_part.done", {**place, "part": part}


def _head(reply: chat.ChatReply, status: str) -> dict[str, Any]:
    named = {"id": f"resp_{reply.call_id}", "object": "response", "created_at": reply.created, "status": status}
    none = dict.fromkeys(("error", "incomplete_details", "instructions", "usage"))
    tools = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {**named, "model": reply.model, **none, **tools, "metadata": {}, "output": []}
