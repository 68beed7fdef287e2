"""Read and write OpenAI's chat completions (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from harness1.serve import chat
from harness1.serve.service import Refused


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolUse(msgspec.Struct):
    """A call of a tool on the wire; some servers and clients leave out its id, or give its arguments as an object."""

    function: _Function
    id: str | None = None

    def to_call(self, instead: str = "") -> chat.Called:
        """Return the call, with another id if it has none."""
        given = self.function.arguments
        arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        return chat.Called(self.id or instead, self.function.name, arguments or "{}")


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[chat.Part] | None = None
    tool_calls: list[ToolUse] | None = None
    tool_call_id: str = ""


class _Declared(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Declared


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Request(chat.Parameters, frozen=True, kw_only=True):
    messages: list[_Message]
    tools: list[_Tool] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: chat.Tokens | None = None
    stream_options: _StreamOptions = _StreamOptions()


ONE_OUTPUT = {"n": ("a call has one output", 1)}  # upstreams are never asked for more
_UNSEEN = "the record could not say which distribution the tokens are from"
FIELDS: chat.Fields = {
    **ONE_OUTPUT,
    "best_of": ("a call has one output", 1),
    "stop": (chat.STOPS_ALONE, "", []),
    **dict.fromkeys(("stop_token_ids", "bad_words"), (_UNSEEN, [])),
    **dict.fromkeys(("logit_bias", "structured_outputs"), (_UNSEEN, {})),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (_UNSEEN, 0)),
    "repetition_penalty": (_UNSEEN, 1),
    "ignore_eos": (_UNSEEN, False),
    "response_format": (_UNSEEN, {"type": "text"}),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), (_UNSEEN,)),
    **dict.fromkeys(("regex", "ebnf", "allowed_token_ids"), (_UNSEEN,)),
    "functions": ("declare them as tools", []),
    "function_call": ("send tool_choice",),
    "modalities": ("this model writes text only", ["text"]),
    "audio": ("this model writes text only",),
    "web_search_options": ("no web is searched here",),
}


def read(body: Mapping[str, Any]) -> chat.ChatRequest:
    """Read a request; raise Refused if the body is not a request, or has parts other than text."""
    asked = chat.convert_body(body, _Request)
    if not asked.messages:
        raise Refused(400, "there are no messages")
    messages = [
        chat.ChatMessage(
            role="system" if each.role == "developer" else each.role,
            text=chat.join_texts(each.content),
            calls=tuple(call.to_call() for call in each.tool_calls or ()),
            answers=each.tool_call_id,
        )
        for each in asked.messages
    ]
    tools = [tool.function for tool in asked.tools]
    specs = [chat.spec_of(each.name, each.description, each.parameters) for each in tools]
    choice, name = choice_of(asked.tool_choice)
    return chat.ChatRequest(
        messages=tuple(messages),
        **chat.choose_tools(specs, choice, name),
        unmet=chat.unmet_by(body, honoured(_Request, choice), FIELDS),
        one_call=not asked.parallel_tool_calls,
        stream_usage=bool(asked.stream_options.include_usage),
        **asked.common() | {"max_tokens": asked.max_completion_tokens or asked.max_tokens},
    )


def honoured(kind: type[chat.Parameters], choice: str) -> set[str]:
    """Return the parameters that are done as asked, by a request's kind and its choice of tools."""
    return {*kind.__struct_fields__} - ({"tool_choice"} if not choice else set())


def choice_of(given: Any) -> tuple[str, str]:
    """Return the choice of tools, and the name of a named one; the choice is "" if it is another one."""
    if isinstance(given, dict) and given.get("type") == "function":
        function = given.get("function", given)  # the function itself in the Responses API
        return "named", str(function.get("name")) if isinstance(function, dict) else ""
    return (given, "") if given in ("auto", "none", "required") else ("", "")


def body_of(request: chat.ChatRequest) -> dict[str, Any]:
    """Return the body of a request without the parameters that are None; the inverse of `read`."""
    messages = []
    for message in request.messages:
        found: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.calls:
            found |= {"content": message.text or None, "tool_calls": [_call(call) for call in message.calls]}
        if message.role == "tool":
            found["tool_call_id"] = message.answers
        messages.append(found)
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.tools:
        body["tools"] = [{"type": "function", "function": msgspec.to_builtins(spec)} for spec in request.tools]
        body["tool_choice"] = "required" if request.must_call else "auto"
        body["parallel_tool_calls"] = not request.one_call
    asked = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
    return body | {name: value for name, value in asked.items() if value is not None}


def write(reply: chat.ChatReply) -> dict[str, Any]:
    """Return a reply as one completion."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def events(reply: chat.ChatReply, usage: bool) -> list[chat.Event]:
    """Return a reply as chunks: role, text, each call, finish reason and, if asked for, usage."""
    head = _head(reply, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": reply.reasoning}] if reply.reasoning else []
    deltas += [{"content": reply.text}] if reply.text else []
    deltas += [{"tool_calls": [{"index": place, **_call(call)}]} for place, call in enumerate(reply.calls)]
    ends: list[tuple[dict[str, Any], str | None]] = [*((delta, None) for delta in deltas), ({}, reply.finish)]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in ends]
    chunks += [{**head, "choices": [], "usage": _usage(reply)}] if usage else []
    return [("", chunk) for chunk in chunks]


def error(status: int, message: str) -> dict[str, Any]:
    """Return the body of a failed call."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    code = "context_length_exceeded" if chat.TOO_LONG in message else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


OPENAI = chat.Dialect("openai", FIELDS, read, write, events, error, last="data: [DONE]\n\n")


def _call(call: chat.Called) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _head(reply: chat.ChatReply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.call_id}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: chat.ChatReply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.output_tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.output_tokens, "total_tokens": total}
