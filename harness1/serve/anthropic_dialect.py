"""Read and write Anthropic's messages (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal

import msgspec

from harness1.serve import chat
from harness1.serve.service import Refused

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}  # error types by status; other statuses below 500 are `invalid_request_error`, the rest `api_error`
THOUGHTS = ("thinking", "redacted_thinking")  # blocks in which another model reasoned; they are not shown to this one


class _Block(chat.Part):
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[_Block] | None = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Choice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Request(chat.Parameters, frozen=True, kw_only=True):
    messages: list[_Message]
    system: str | list[_Block] = ""
    tools: list[_Tool] = []
    tool_choice: _Choice = _Choice()


FIELDS: chat.Fields = {
    "stop_sequences": (chat.STOPS_ALONE, []),
    "mcp_servers": ("these servers would be called by the provider", []),
    "container": ("its code would run at the provider",),
}


def read(body: Mapping[str, Any]) -> chat.ChatRequest:
    """Read a request; raise Refused if it is none, or has blocks that no text model reads. A tool of the provider, with
    which its models were trained, is not offered."""
    asked = chat.convert_body(body, _Request)
    if not asked.messages:
        raise Refused(400, "there are no messages")
    system = chat.join_texts(asked.system)
    messages = [chat.ChatMessage("system", system)] if system else []
    for message in asked.messages:
        messages += _messages(message)
    own = [tool for tool in asked.tools if tool.type == "custom"]
    specs = [chat.spec_of(tool.name, tool.description, tool.input_schema) for tool in own]
    others = [tool for tool in asked.tools if tool.type != "custom"]
    choice = asked.tool_choice
    kind = {"any": "required", "tool": "named"}.get(choice.type, choice.type)
    if choice.name in [tool.name for tool in others]:
        kind = "none"
    return chat.ChatRequest(
        messages=tuple(messages),
        **chat.choose_tools(specs, kind, choice.name),
        one_call=bool(choice.disable_parallel_tool_use),
        unmet=chat.unmet_by(body, _Request.__struct_fields__, FIELDS, [f"{tool.type} {tool.name}" for tool in others]),
        **asked.common(),
    )


def _messages(message: _Message) -> Iterator[chat.ChatMessage]:
    blocks = [_Block("text", message.content)] if isinstance(message.content, str) else message.content
    blocks = [block for block in blocks if block.type not in THOUGHTS]
    if message.role == "assistant":
        uses = [block for block in blocks if block.type == "tool_use"]
        calls = [chat.Called(block.id, block.name, msgspec.json.encode(block.input).decode()) for block in uses]
        text = chat.join_texts([block for block in blocks if block.type != "tool_use"])
        yield chat.ChatMessage("assistant", text, tuple(calls))
        return
    for results, run in groupby(blocks, lambda block: block.type == "tool_result"):
        if not results:
            yield chat.ChatMessage(message.role, chat.join_texts(list(run)))
            continue
        for block in run:
            yield chat.ChatMessage("tool", chat.join_texts(block.content), answers=block.tool_use_id)


def write(reply: chat.ChatReply) -> dict[str, Any]:
    """Return a reply as one message."""
    content = [{**block, **filling} for block, filling in _blocks(reply)]
    return _head(reply, reply.output_tokens) | {"content": content, "stop_reason": STOPS[reply.finish]}


def events(reply: chat.ChatReply, usage: bool) -> list[chat.Event]:
    """Return a reply as a stream: the empty message, one delta for each block, and the stop reason."""
    found: list[chat.Event] = [("message_start", {"message": _head(reply, 0)})]
    for index, (block, filling) in enumerate(_blocks(reply)):
        empty: dict[str, Any] = {"text": ""}
        delta = {"type": "text_delta", **filling}
        if "input" in filling:
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(filling["input"]).decode()}
        found.append(("content_block_start", {"index": index, "content_block": {**block, **empty}}))
        found.append(("content_block_delta", {"index": index, "delta": delta}))
        found.append(("content_block_stop", {"index": index}))
    end = {"stop_reason": STOPS[reply.finish], "stop_sequence": None}
    usage_of = _head(reply, reply.output_tokens)["usage"]
    found += [("message_delta", {"delta": end, "usage": usage_of}), ("message_stop", {})]
    return [(name, {"type": name, **data}) for name, data in found]


def error(status: int, message: str) -> dict[str, Any]:
    """Return the body of a failed call."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = chat.Dialect("anthropic", FIELDS, read, write, events, error)


def _blocks(reply: chat.ChatReply) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    if reply.text:
        yield {"type": "text"}, {"text": reply.text}
    for call in reply.calls:
        yield {"type": "tool_use", "id": call.call_id, "name": call.name}, {"input": call.meaning()}


def _head(reply: chat.ChatReply, output_tokens: int) -> dict[str, Any]:
    names = {"id": f"msg_{reply.call_id}", "type": "message", "role": "assistant", "model": reply.model}
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": output_tokens}
    return {**names, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
