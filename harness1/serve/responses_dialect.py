"""Read and write OpenAI's Responses (https://platform.openai.com/docs/api-reference/responses). Items and events are
those of `openai.types.responses` in OpenAI's Python client; what Codex reads of them is in `codex-rs/codex-api`,
`src/sse/responses.rs`, and what it sends in `src/common.rs` there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from harness1.serve import chat
from harness1.serve.fields import AS_TRAINED, TOO_LONG, honoured, recorded, refused, unmet_by
from harness1.serve.openai_dialect import FIELDS as OPENAI_FIELDS
from harness1.serve.openai_dialect import OTHER_CHOICE, choice_of, error
from harness1.serve.service import Refused

CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Items that call a tool, and what holds the arguments."""
RESULTS = ("function_call_output", "custom_tool_call_output")
THOUGHTS = ("reasoning", "compaction")  # items in which another model thought; they are not shown to this one
LONGEST = 8 << 20  # bytes of the items of a conversation that is continued
TEXTS = ("input_text", "output_text", "text")


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[_Part] | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct, kw_only=True):
    input: str | list[_Item]
    model: str = ""
    instructions: str = ""
    tools: list[_Tool] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: chat.Tokens | None = None
    temperature: chat.Temperature | None = None
    top_p: chat.TopP | None = None
    top_k: chat.TopK | None = None  # as `seed` no part of OpenAI's API: clients send them as `extra_body`
    seed: chat.Seed | None = None
    stream: bool = False
    store: bool = True
    previous_response_id: str = ""


FIELDS = {
    **{name: field for name, field in OPENAI_FIELDS.items() if field.does == "refused"},
    **honoured(*_Request.__struct_fields__),
    "conversation": refused("continue by previous_response_id, or send the whole input"),
    "background": refused("an answer comes on the connection that asks for it", False),
    "prompt": refused("no prompts are stored here"),
    "reasoning": recorded(AS_TRAINED, {}),
    "text": recorded(f"{AS_TRAINED}: verbosity and schema are not enforced", {}, {"format": {"type": "text"}}),
    "truncation": recorded("a conversation is read as it is sent", "disabled"),
    "include": recorded("there is nothing to include", []),
}


def read(body: Mapping[str, Any]) -> chat.ChatRequest:
    """Read a request whose earlier responses were put before its input; raise Refused if it is none, or has parts that
    no text model reads. Tools other than functions are not offered."""
    asked = chat.convert_body(body, _Request)
    items = [_Item(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
    messages = list(_messages(items))
    if not messages:
        raise Refused(400, "there are no messages")
    if asked.instructions:
        messages.insert(0, chat.ChatMessage("system", asked.instructions))
    functions = [tool for tool in asked.tools if tool.type == "function"]
    others = [f"{tool.type} {tool.name}".strip() for tool in asked.tools if tool.type != "function"]
    choice, name = choice_of(asked.tool_choice)
    return chat.ChatRequest(
        messages=tuple(messages),
        **chat.choose_tools(
            [chat.spec_of(tool.name, tool.description, tool.parameters) for tool in functions], choice, name
        ),
        one_call=not asked.parallel_tool_calls,
        unmet=unmet_by(body, FIELDS if choice else {**FIELDS, "tool_choice": OTHER_CHOICE}, others),
        max_tokens=asked.max_output_tokens,
        **{name: getattr(asked, name) for name in ("model", "temperature", "top_p", "top_k", "seed", "stream")},
    )


def write(reply: chat.ChatReply) -> dict[str, Any]:
    """Return a reply as one response."""
    cut = reply.finish == "length"
    found = _head(reply, "incomplete" if cut else "completed")
    details = {"reason": "max_output_tokens"} if cut else None
    return found | {"output": output_of(reply), "incomplete_details": details, "usage": _usage(reply)}


def output_of(reply: chat.ChatReply) -> list[dict[str, Any]]:
    """Return the items of a reply: what it thought, its text, and its calls."""
    status = "incomplete" if reply.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        items.append({"id": f"rs_{reply.call_id}", "type": "reasoning", "summary": [], "content": [thought]})
    if reply.text or not reply.calls:
        said = {"id": f"msg_{reply.call_id}", "type": "message", "role": "assistant", "status": status}
        items.append(said | {"content": [_text_part(reply.text)]})
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
    items: bytes  # those that this response added: its input and its output


class Responses:
    """Responses that later requests of their session continue (`previous_response_id`) or refer to (`item_reference`):
    in RAM only, bounded in number and bytes; the least recently used go first."""

    def __init__(self, most: int = 100_000, most_bytes: int = 256 << 20) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def owner(self, body: Mapping[str, Any]) -> str | None:
        """Return the session of the response that a body continues."""
        before = body.get("previous_response_id")
        return found.session if isinstance(before, str) and (found := self._kept.get(before)) else None

    def expand(self, body: dict[str, Any], session: str) -> dict[str, Any]:
        """Return a body with all items of the conversation as its input. Raise Refused if it continues a response, or
        refers to an item, that is not known in the session any more, or the conversation is too long."""
        before, earlier, size = body.get("previous_response_id"), list[Any](), 0
        while before:
            kept = self._kept.get(before) if isinstance(before, str) else None
            if kept is None or kept.session != session:
                raise Refused(400, f"previous_response_id {str(before)[:100]!r}: this session has no such response")
            if (size := size + len(kept.items)) > LONGEST:
                raise Refused(400, f"{TOO_LONG}: more than {LONGEST} bytes of items")
            self._kept.move_to_end(before)
            earlier[:0] = msgspec.json.decode(kept.items)
            before = kept.before
        whole = [*earlier, *(self._resolve(item, session) for item in items_of(body))]
        return {**body, "input": whole} if whole else body

    def keep(self, body: Mapping[str, Any], session: str, reply: chat.ChatReply) -> None:
        """Keep a response, unless the client says that it will not be continued (`store`)."""
        if body.get("store") is False:
            return
        items = msgspec.json.encode([*items_of(body), *output_of(reply)])
        self._kept[f"resp_{reply.call_id}"] = _Kept(session, str(body.get("previous_response_id") or ""), items)
        self._bytes += len(items)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, forgotten = self._kept.popitem(last=False)
            self._bytes -= len(forgotten.items)

    def _resolve(self, item: Any, session: str) -> Any:
        """Return the item that another one refers to; the ids of ours end with that of their response."""
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            return item
        named = str(item.get("id"))
        kept = self._kept.get("resp_" + named.partition("_")[2].partition("_")[0])
        known = msgspec.json.decode(kept.items) if kept and kept.session == session else []
        if found := next((each for each in known if isinstance(each, dict) and each.get("id") == named), None):
            return found
        raise Refused(400, f"item_reference {named[:100]!r}: this session has no such item")


def items_of(body: Mapping[str, Any]) -> list[Any]:
    """Return the input of a body as items, whatever they are."""
    given = body.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given if isinstance(given, list) else []


def _messages(items: Sequence[_Item]) -> Iterator[chat.ChatMessage]:
    """Yield the messages of a conversation. An answer is several items: a text, and the calls that follow it."""
    said: chat.ChatMessage | None = None
    for item in items:
        if item.type in CALLS:
            call = chat.Called(item.call_id or "", item.name or "", _arguments(item))
            said = said or chat.ChatMessage("assistant")
            said = msgspec.structs.replace(said, calls=(*said.calls, call))
            continue
        if item.type in THOUGHTS:
            continue
        if said:
            yield said
        said = None
        if item.type in RESULTS:
            yield chat.ChatMessage("tool", _text(item.output), answers=item.call_id or "")
        elif item.type == "message" and item.role == "assistant":
            said = chat.ChatMessage("assistant", _text(item.content))
        elif item.type == "message" and item.role in ("user", "system", "developer"):
            yield chat.ChatMessage("user" if item.role == "user" else "system", _text(item.content))
        else:
            kind = f"a message of role {item.role!r}" if item.type == "message" else f"an item of type {item.type!r}"
            raise Refused(400, f"{kind} cannot be read here")
    if said:
        yield said


def _arguments(item: _Item) -> str:
    if item.type == "custom_tool_call":
        return msgspec.json.encode({"input": item.input or ""}).decode()
    return item.arguments or "{}"


def _text(content: str | list[_Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if other := next((part.type for part in content if part.type not in (*TEXTS, "refusal")), None):
        raise Refused(400, f"a part of type {other!r} cannot be read: this model takes text only")
    return "\n".join(part.text or part.refusal or "" for part in content)


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


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _head(reply: chat.ChatReply, status: str) -> dict[str, Any]:
    named = {"id": f"resp_{reply.call_id}", "object": "response", "created_at": reply.created, "status": status}
    none = dict.fromkeys(("error", "incomplete_details", "instructions", "usage"))
    tools = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {**named, "model": reply.model, **none, **tools, "metadata": {}, "output": []}


def _usage(reply: chat.ChatReply) -> dict[str, Any]:
    counts = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.output_tokens}
    cached, thought = {"cached_tokens": 0, "cache_write_tokens": 0}, {"reasoning_tokens": 0}
    total = reply.prompt_tokens + reply.output_tokens
    return counts | {"input_tokens_details": cached, "output_tokens_details": thought, "total_tokens": total}
