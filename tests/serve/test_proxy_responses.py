"""OpenAI's Responses: items become messages, and replies items and events that its client reads."""

from pathlib import Path
from typing import Any, get_args

import pytest

from harness1.serve.chat import Called, ChatMessage, ChatReply, ChatRequest
from harness1.serve.responses_dialect import RESPONSES
from harness1.serve.service import Refused
from tests.proxying import RESPONSES_PATH, Dice, ask, hermes, recorded, upstream_of

CALLS = (Called("call_7_0", "look", '{"at": "é"}'), Called("call_7_1", "stop", "{}"))
REPLY = ChatReply(call_id="7", model="m", text="I look.", reasoning="Hm.", calls=CALLS, finish="tool_calls", created=5)
TOOL = {"type": "function", "name": "search_corpus", "parameters": {"type": "object", "properties": {"query": {}}}}
ASKED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


def read(**body: Any) -> ChatRequest:
    return RESPONSES.read({"input": [ASKED], **body})


def test_items_become_messages_and_an_answer_is_one_of_them() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        ASKED,
        *RESPONSES.write(REPLY)["output"],
        {"type": "function_call_output", "call_id": "call_7_0", "output": [{"type": "input_text", "text": "There."}]},
        {"type": "function_call_output", "call_id": "call_7_1", "output": "Stopped."},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
    ]
    assert read(input=items, instructions="You search.").messages == (
        ChatMessage("system", "You search."),
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "I look.", CALLS),
        ChatMessage("tool", "There.", answers="call_7_0"),
        ChatMessage("tool", "Stopped.", answers="call_7_1"),
        ChatMessage("assistant", "", (Called("c", "patch", '{"input":"*** Begin"}'),)),
        ChatMessage("tool", "Done.", answers="c"),
    )
    assert read(input="Hi").messages == (ChatMessage("user", "Hi"),)


def test_parameters_are_honoured_recorded_or_refused() -> None:
    asked = {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}, "include": ["reasoning.encrypted_content"]}
    found = read(**asked, store=False, stream=True, max_output_tokens=7, temperature=0.5, prompt_cache_key="k")
    assert (found.max_tokens, found.temperature, found.stream) == (7, 0.5, True)
    assert found.unmet == {**asked, "prompt_cache_key": "k"}
    assert read(reasoning={}, include=[], parallel_tool_calls=False).unmet == {}
    custom = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}
    tools = [TOOL, custom, {"type": "web_search"}]
    offered = read(tools=tools)
    assert [tool.name for tool in offered.tools] == ["search_corpus"]
    assert offered.unmet == {"tools": ["custom apply_patch", "web_search"]}
    named = read(tools=tools, tool_choice={"type": "function", "name": "search_corpus"})
    assert (named.must_call, len(named.tools)) == (True, 1)
    assert read(tools=tools, tool_choice="none").tools == ()
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    for body in ({"input": [image]}, {"input": []}, {"input": [{"type": "mcp_call"}]}, {"tool_choice": named_other()}):
        with pytest.raises(Refused):
            read(**body)


def named_other() -> dict[str, str]:
    return {"type": "function", "name": "other"}


def test_a_reply_is_what_the_client_of_openai_reads_whole_and_in_a_stream() -> None:
    from openai.types.responses import Response, ResponseStreamEvent

    whole = RESPONSES.write(REPLY)
    known = Response.model_validate(whole, strict=True)
    assert (known.status, known.output_text) == ("completed", "I look.")
    assert [item.type for item in known.output] == ["reasoning", "message", "function_call", "function_call"]
    union, _ = get_args(ResponseStreamEvent)
    types = {get_args(each.model_fields["type"].annotation)[0]: each for each in get_args(union)}
    events = [data for name, data in RESPONSES.events(REPLY, True) if name == data["type"]]
    known_events = [types[event["type"]].model_validate(event) for event in events]
    assert [event.sequence_number for event in known_events] == list(range(len(events)))
    assert events[-1]["response"] == whole
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    joined = "".join(event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta")
    assert joined == '{"at": "é"}{}'
    cut = RESPONSES.events(ChatReply(call_id="1", text="I", finish="length"), True)[-1]
    assert (cut[0], cut[1]["response"]["incomplete_details"]) == (
        "response.incomplete",
        {"reason": "max_output_tokens"},
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"previous_response_id": "resp_7", "input": "Go on"}, "previous_response_id: nothing is stored here"),
        ({"input": [{"type": "item_reference", "id": "fc_7_0"}]}, "an item of type 'item_reference' cannot be read"),
    ],
)
def test_what_a_client_believes_to_be_stored_is_refused(tmp_path: Path, body: dict[str, Any], says: str) -> None:
    model = Dice(hermes())
    (call,) = recorded(tmp_path, upstream_of(model, model.chat), lambda service: ask(service, body, RESPONSES_PATH))
    assert (call.status, call.dialect, says in str(call.error)) == (400, "responses", True)
