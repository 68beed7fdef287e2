"""OpenAI's Responses: items become messages and replies items, and a conversation goes on by the id of its response."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from harness1.rows.calls import RecordedCall
from harness1.serve.chat import Called, ChatMessage, ChatReply, ChatRequest
from harness1.serve.proxy import ProxyService
from harness1.serve.responses_dialect import LONGEST, RESPONSES, Responses
from harness1.serve.service import Refused
from tests.proxying import RESPONSES_PATH, Dice, ask, hermes, recorded, upstream_of
from tests.support import search

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


Body = dict[str, Any]


def talk(run: Path, *bodies: Body, sessions: str = "") -> tuple[list[RecordedCall], list[Body]]:
    """Return the records and the answers; `LATEST` in an id stands for that of the latest response."""
    model, answers = Dice(hermes(), (search("poet"),)), list[Body]()

    async def scene(service: ProxyService) -> None:
        for number, body in enumerate(bodies):
            latest = answers[-1]["id"].removeprefix("resp_") if answers else ""
            sent = json.dumps({"tools": [TOOL], **body}).replace("LATEST", latest).encode()
            headers = {"x-session-id": sessions[number]} if sessions else {}
            answers.append(json.loads((await ask(service, sent, RESPONSES_PATH, headers)).body))

    return recorded(run, upstream_of(model, model.chat), scene), answers


RESULT = {"type": "function_call_output", "call_id": "call_LATEST_0", "output": "Nothing."}
REFERENCE = {"type": "item_reference", "id": "fc_LATEST_0"}
FURTHER = {"previous_response_id": "resp_LATEST", "input": [RESULT]}
REFERRING = {"input": [ASKED, REFERENCE, RESULT]}


@pytest.mark.parametrize("further", [FURTHER, REFERRING])
def test_a_conversation_goes_on_from_a_response_or_its_items_with_their_very_tokens(
    tmp_path: Path, further: Body
) -> None:
    calls, _ = talk(tmp_path, {"input": "Hi"}, further, FURTHER)
    assert [(call.status, call.dialect) for call in calls] == [(200, "responses")] * 3
    assert len({call.session_id for call in calls}) == 1, "a response tells its session"
    for earlier, later in pairwise(calls):
        so_far = earlier.prompt_ids + earlier.output_ids
        assert later.prompt_ids[: len(so_far)] == so_far


@pytest.mark.parametrize(
    ("first", "second", "sessions"),
    [
        ({}, FURTHER, "ab"),
        ({"store": False}, FURTHER, "aa"),
        ({}, {"previous_response_id": "resp_other", "input": "Go on"}, "aa"),
        ({}, {"previous_response_id": 7, "input": "Go on"}, ""),
        ({}, REFERRING, "ab"),
        ({}, {"input": [{**REFERENCE, "id": "fc_LATEST_1"}]}, "aa"),
    ],
)
def test_what_is_not_kept_or_of_another_session_cannot_be_continued(
    tmp_path: Path, first: Body, second: Body, sessions: str
) -> None:
    calls, answers = talk(tmp_path, {"input": "Hi", **first}, second, sessions=sessions)
    assert [call.status for call in calls] == [200, 400]
    assert "this session has no such" in answers[1]["error"]["message"]


def test_kept_responses_are_bounded_and_the_least_recently_used_go_first() -> None:
    few, small = Responses(most=3), Responses(most_bytes=1000)
    few.keep({}, [], "s", ChatReply(call_id="0"))
    for number in range(1, 5):
        few.keep({}, [], "s", ChatReply(call_id=str(number)))
        few.expand({"previous_response_id": "resp_0"}, "s")
        small.keep({}, [b'"%s"' % (b"x" * 300)], "s", ChatReply(call_id=str(number)))
    assert [few.owner({"previous_response_id": f"resp_{number}"}) for number in range(5)] == ["s", None, None, "s", "s"]
    assert [small.owner({"input": [{"type": "item_reference", "id": f"msg_{number}"}]}) for number in (1, 4)] == [
        None,
        "s",
    ]


def test_a_conversation_that_became_longer_than_a_body_may_be_is_refused() -> None:
    responses, half = Responses(), [b'{"content":"%s"}' % (b"x" * (LONGEST // 2))]
    for number in range(2):
        responses.keep({"previous_response_id": "resp_0"} if number else {}, half, "s", ChatReply(call_id=str(number)))
    assert responses.expand({"previous_response_id": "resp_0"}, "s")[1] == []
    for body, says in (
        ({"previous_response_id": "resp_1"}, "prompt is too long"),
        ({"input": 7}, "neither a text nor"),
    ):
        with pytest.raises(Refused, match=says):
            responses.expand(body, "s")
