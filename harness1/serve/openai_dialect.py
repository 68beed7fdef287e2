"""Read and write OpenAI's chat completions (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from harness1.serve import chat
from harness1.serve.fields import AS_TRAINED, STOPS_ALONE, TOO_LONG, honoured, recorded, refused, unmet_by
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


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
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
    return_token_ids: bool = False  # an extension of vLLM


ONE_OUTPUT = {"n": refused("a call has one output", 1)}  # upstreams are never asked for more
_UNSEEN = "the record could not say which distribution the tokens are from"
OTHER_CHOICE = recorded("all tools are offered")
FIELDS = {
    **honoured(*_Request.__struct_fields__),
    **ONE_OUTPUT,
    "best_of": refused("a call has one output", 1),
    "stop": refused(STOPS_ALONE, "", []),
    **dict.fromkeys(("stop_token_ids", "bad_words"), refused(_UNSEEN, [])),
    **dict.fromkeys(("logit_bias", "structured_outputs"), refused(_UNSEEN, {})),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), refused(_UNSEEN, 0)),
    "repetition_penalty": refused(_UNSEEN, 1),
    "ignore_eos": refused(_UNSEEN, False),
    "response_format": refused(_UNSEEN, {"type": "text"}),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), refused(_UNSEEN)),
    **dict.fromkeys(("regex", "ebnf", "allowed_token_ids"), refused(_UNSEEN)),
    "functions": refused("declare them as tools", []),
    "function_call": refused("send tool_choice"),
    "modalities": refused("this model writes text only", ["text"]),
    "audio": refused("this model writes text only"),
    "web_search_options": refused("no web is searched here"),
    **dict.fromkeys(("reasoning_effort", "verbosity"), recorded(AS_TRAINED)),
}


def read(body: Mapping[str, Any]) -> chat.ChatRequest:
    """Read a request; raise Refused if the body is not a request, or has parts other than text."""
    asked = chat.convert_body(body, _Request)
    if not asked.messages:
        raise Refused(400, "there are no messages")
    messages = [
        chat.ChatMessage(
            role="system" if each.role == "developer" else each.role,
            text=_text(each.content),
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
        unmet=unmet_by(body, FIELDS if choice else {**FIELDS, "tool_choice": OTHER_CHOICE}),
        one_call=not asked.parallel_tool_calls,
        stream_usage=bool(asked.stream_options.include_usage),
        token_ids=asked.return_token_ids,
        **asked.common() | {"max_tokens": asked.max_completion_tokens or asked.max_tokens},
    )


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
    for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"):
        if (value := getattr(request, name)) is not None:
            body[name] = value
    return body


def write(reply: chat.ChatReply) -> dict[str, Any]:
    """Return a reply as one completion, with its tokens, if asked for, in the fields that vLLM uses."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
    found = {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}
    if reply.tokens is not None:
        choice["token_ids"], found["prompt_token_ids"] = reply.tokens.output_ids, reply.tokens.prompt_ids
        if reply.tokens.output_logprobs is not None:
            named = zip(reply.tokens.output_ids, reply.tokens.output_logprobs, strict=True)
            content = [{"token": f"token_id:{token}", "logprob": value, "top_logprobs": []} for token, value in named]
            choice["logprobs"] = {"content": content}
    return found


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
    code = "context_length_exceeded" if TOO_LONG in message else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


OPENAI = chat.Dialect("openai", FIELDS, read, write, events, error, last="data: [DONE]\n\n")


def _text(content: str | list[_Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if other := next((part.type for part in content if part.type != "text"), None):
        raise Refused(400, f"a part of type {other!r} cannot be read: this model takes text only")
    return "\n".join(part.text for part in content)


def _call(call: chat.Called) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _head(reply: chat.ChatReply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.call_id}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: chat.ChatReply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.output_tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.output_tokens, "total_tokens": total}
