"""What agents send becomes one normal form, and what they get has their provider's form."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import Env
from harness1.models.calls import tools_of
from harness1.serve.anthropic_dialect import ANTHROPIC
from harness1.serve.chat import (
    MOST_PARTS,
    TOO_LONG,
    Called,
    ChatMessage,
    ChatReply,
    ChatRequest,
    decode_body,
    refuse_fields,
)
from harness1.serve.openai_dialect import ONE_OUTPUT, OPENAI, body_of
from harness1.serve.responses_dialect import RESPONSES
from harness1.serve.service import Refused
from harness1.tools.registry import Toolbox
from tests.proxying import as_anthropic

SPECS = Toolbox.of(Env()).specs
CALLED = Called("call_7_0", "search_corpus", '{"query": "é"}')
TALK = (
    ChatMessage("system", "You search.\n"),
    ChatMessage("user", " Where?\n"),
    ChatMessage("assistant", "I look.", (CALLED, Called("call_7_1", "end_search", "{}"))),
    ChatMessage("tool", "Found.\n", answers="call_7_0"),
    ChatMessage("tool", "Not executed.\n", answers="call_7_1"),
    ChatMessage("user", "Go on.\n"),
    ChatMessage("assistant", "Done."),
)
COUNTS: dict[str, Any] = {"created": 5, "prompt_tokens": 11, "output_tokens": 3}
REPLY = ChatReply(call_id="7", model="m", text="I look.", calls=TALK[2].calls, finish="tool_calls", **COUNTS)


def openai(**body: Any) -> ChatRequest:
    return OPENAI.read({"messages": [{"role": "user", "content": "Hi"}], **body})


def anthropic(**body: Any) -> ChatRequest:
    return ANTHROPIC.read({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, **body})


def sent(body: dict[str, Any]) -> dict[str, Any]:
    return decode_body(json.dumps(body).encode())


def refused(body: dict[str, Any]) -> str:
    def both() -> None:
        refuse_fields(body, OPENAI.fields)
        OPENAI.read(body)

    with pytest.raises(Refused) as caught:
        both()
    assert caught.value.status_code == 400
    return str(caught.value)


def test_messages_and_tools_come_out_of_either_form_as_they_went_in() -> None:
    request = ChatRequest(messages=TALK, tools=SPECS, model="m", temperature=0.5, top_p=0.9, max_tokens=9, seed=4)
    body = sent(body_of(request))
    assert OPENAI.read(body) == request
    assert body["tools"] == sent({"tools": tools_of(SPECS)})["tools"]
    system, turns = as_anthropic(body["messages"])
    tools = [{"name": s.name, "description": s.description, "input_schema": s.parameters} for s in SPECS]
    other = {"system": system, "messages": turns, "tools": tools, "model": "m", "temperature": 0.5, "top_p": 0.9}
    found = ANTHROPIC.read(sent({**other, "max_tokens": 9, "seed": 4}))
    assert [message.text for message in found.messages] == [message.text for message in TALK]
    assert [call.meaning() for call in found.messages[2].calls] == [{"query": "é"}, {}]
    assert msgspec.structs.replace(found, messages=()) == msgspec.structs.replace(request, messages=())


def test_anthropic_blocks_are_read_in_their_order() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "A"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "b"},
        {"type": "text", "text": "and", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "more"},
    ]
    thought = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Said"}]
    system = [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}]
    messages = [{"role": "user", "content": blocks}, {"role": "assistant", "content": thought}]
    assert ANTHROPIC.read({"system": system, "messages": messages}).messages == (
        ChatMessage("system", "S1\nS2"),
        ChatMessage("tool", "A", answers="a"),
        ChatMessage("tool", "", answers="b"),
        ChatMessage("user", "and\nmore"),
        ChatMessage("assistant", "Said"),
    )


def test_openai_parts_and_roles_are_read() -> None:
    asked = {"role": "developer", "content": [{"type": "text", "text": "D"}]}
    said = {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "audio": None}
    found = OPENAI.read({"messages": [asked, said]})
    assert found.messages == (ChatMessage("system", "D"), ChatMessage("assistant", ""))


def test_what_was_said_about_sampling_is_read_and_the_rest_left_open() -> None:
    assert openai().temperature is openai().max_tokens is openai().seed is None
    assert openai(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert (openai(temperature=0).temperature, openai(top_k=-1).top_k) == (0.0, -1)
    assert openai(parallel_tool_calls=False).one_call
    assert anthropic(tool_choice={"type": "any", "disable_parallel_tool_use": True}).one_call
    assert anthropic(tool_choice={"type": "any"}).must_call
    assert openai(stream=True, stream_options={"include_usage": True}).stream_usage
    assert anthropic(top_k=4, metadata={"user_id": "x"}, service_tier="auto").top_k == 4


def test_parameters_that_would_change_the_distribution_are_refused_and_others_ignored() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    changing = {"n": 2, "stop": ["END"], "logit_bias": {"5": 1}, "presence_penalty": 0.5}
    for name, value in {**changing, "response_format": {"type": "json_object"}}.items():
        assert name in refused({**body, name: value})
    harmless = {"n": 1, "stop": [], "logit_bias": {}, "presence_penalty": 0.0, "tool_choice": "auto", "user": "me"}
    refuse_fields({**body, **harmless, "store": True, "metadata": {}, "logprobs": True}, OPENAI.fields)
    with pytest.raises(Refused, match="stop_sequences: an output ends with"):
        refuse_fields({"stop_sequences": ["x"]}, ANTHROPIC.fields)
    refuse_fields({"thinking": {"type": "adaptive"}, "stop_sequences": []}, ANTHROPIC.fields)
    refuse_fields({"stop": ["END"], "n": 1}, ONE_OUTPUT)


def test_what_a_model_cannot_do_is_put_in_the_record_and_what_asks_for_nothing_is_not() -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    asked = {"thinking": {"type": "adaptive"}, "context_management": edits, "metadata": {"user_id": "u"}}
    assert anthropic(**asked, stop_sequences=[], output_config={}, temperature=1).unmet == asked
    assert openai(reasoning_effort="high", user="me", n=1).unmet == {"reasoning_effort": "high", "user": "me"}
    long = anthropic(metadata={"user_id": "x" * 100_000}, **{f"field_{number}": 1 for number in range(1000)}).unmet
    assert len(json.dumps(long)) < 10_000, "a client decides nothing about the size of a record"


def test_the_documentation_names_every_parameter_that_is_refused() -> None:
    told = Path("docs/agents.md").read_text(encoding="utf-8").partition("| refused |")[2]
    fields = OPENAI.fields.keys() | RESPONSES.fields.keys() | ANTHROPIC.fields.keys()
    assert [name for name in fields if f"`{name}`" not in told] == []


def test_tools_of_a_provider_are_recorded_and_not_offered() -> None:
    own, web = {"name": "x", "input_schema": {}}, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    found = anthropic(tools=[own, web])
    assert ([tool.name for tool in found.tools], found.unmet) == (["x"], {"tools": ["web_search_20250305 web_search"]})
    chosen = anthropic(tools=[own, web], tool_choice={"type": "tool", "name": "web_search"})
    assert (chosen.tools, chosen.must_call) == ((), False)


def test_a_named_tool_is_the_only_one_offered_and_is_required() -> None:
    tools = body_of(ChatRequest(messages=TALK, tools=SPECS))["tools"]
    named = {"type": "function", "function": {"name": "end_search"}}
    found = openai(tools=tools, tool_choice=named)
    assert ([tool.name for tool in found.tools], found.must_call) == (["end_search"], True)
    assert "none of the tools" in refused({"messages": [{"role": "user", "content": "Hi"}], "tool_choice": named})
    own = [{"name": name, "input_schema": {}} for name in "xy"]
    other = anthropic(tools=own, tool_choice={"type": "tool", "name": "y"})
    assert ([tool.name for tool in other.tools], other.must_call) == (["y"], True)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    assert (openai(tools=tools, tool_choice=allowed).tools, openai(tool_choice=allowed).unmet["tool_choice"]) == (
        *(SPECS, allowed),
    )


def test_what_is_no_request_is_the_clients_fault() -> None:
    for body in (
        *({"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": 1.5}, {"max_tokens": 0}),
        *({"max_tokens": True}, {"seed": -1}, {"seed": 2**64}, {"messages": []}, {"messages": "Hi"}),
        {"messages": [{"role": "robot", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"properties": [1]}}}]},
    ):
        assert refused({"messages": [{"role": "user", "content": "Hi"}], **body})
    for body in (
        {"tool_choice": {"type": "tool", "name": "x"}},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": []},
    ):
        with pytest.raises(Refused) as caught:
            anthropic(**body)
        assert caught.value.status_code == 400
    for broken in (b"", b"[]", b"nonsense", b'{"a": ', b"\xff", b"[" * 100_000, b'{"x": [%s1]}' % (b"1," * MOST_PARTS)):
        with pytest.raises(Refused):
            decode_body(broken)


def test_tools_that_must_not_be_called_are_not_declared() -> None:
    tools = body_of(ChatRequest(messages=TALK, tools=SPECS))["tools"]
    assert openai(tools=tools).tools == SPECS
    assert openai(tools=tools, tool_choice="none").tools == ()
    own = [{"name": "x", "input_schema": {}}]
    assert [anthropic(tools=own, tool_choice={"type": kind}).tools == () for kind in ("auto", "none")] == [False, True]
    refuse_fields({"tool_choice": "none"}, OPENAI.fields)


def test_a_null_is_as_good_as_nothing_but_in_arguments_and_schemas() -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "Hi"}], "tool_call_id": None, "tool_calls": None}
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "x", "arguments": None}}]}
    assert OPENAI.read({"messages": [said, called]}).messages == (
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", calls=(Called("c", "x"),)),
    )
    use = {"type": "tool_use", "id": "c", "name": "x", "input": {"a": None}, "text": None}
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    found = anthropic(
        messages=[{"role": "assistant", "content": [use]}], tools=[{"name": "x", "type": None, "input_schema": schema}]
    )
    assert found.messages[0].calls[0].meaning() == {"a": None}
    assert found.tools[0].parameters == schema


def test_arguments_that_are_no_json_still_mean_something() -> None:
    assert Called("1", "x", "").meaning() == {}
    assert Called("1", "x", "{oops").meaning() == {"arguments": "{oops"}
    assert Called("1", "x", "[1]").meaning() == {"arguments": "[1]"}
    assert msgspec.json.encode(Called("1", "x", '{"a": "\\ud800"}').meaning())


def test_a_reply_has_the_form_of_its_provider() -> None:
    found = OPENAI.write(REPLY)
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    functions = ({"name": "search_corpus", "arguments": '{"query": "é"}'}, {"name": "end_search", "arguments": "{}"})
    calls = [{"id": f"call_7_{at}", "type": "function", "function": each} for at, each in enumerate(functions)]
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "I look.", "tool_calls": calls}
    assert found["usage"] == {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    other = ANTHROPIC.write(REPLY)
    assert (other["id"], other["stop_reason"]) == ("msg_7", "tool_use")
    assert other["usage"] == {"input_tokens": 11, "output_tokens": 3}
    assert other["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_7_0", "name": "search_corpus", "input": {"query": "é"}},
        {"type": "tool_use", "id": "call_7_1", "name": "end_search", "input": {}},
    ]
    assert ANTHROPIC.write(ChatReply(call_id="1", finish="length"))["stop_reason"] == "max_tokens"
    assert OPENAI.write(ChatReply(call_id="1"))["choices"][0]["message"]["content"] == ""
    *chunks, (_, last) = OPENAI.events(REPLY, usage=True)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 14)
    assert OPENAI.events(REPLY, usage=False) == chunks


def test_an_error_has_the_form_of_its_provider() -> None:
    assert OPENAI.error(400, "no")["error"]["type"] == "invalid_request_error"
    assert OPENAI.error(400, f"{TOO_LONG}: 9")["error"]["code"] == "context_length_exceeded"
    assert OPENAI.error(502, "no")["error"] == {"message": "no", "type": "server_error", "param": None, "code": None}
    assert ANTHROPIC.error(502, "no") == {"type": "error", "error": {"type": "api_error", "message": "no"}}
    kinds = [ANTHROPIC.error(status, "no")["error"]["type"] for status in (400, 404, 413, 429, 503, 504)]
    expected = ["invalid_request_error", "not_found_error", "request_too_large", "rate_limit_error"]
    assert kinds == [*expected, "api_error", "api_error"]
