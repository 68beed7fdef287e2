"""A server that finds no calls in what its model wrote: they are read from the text, sent back as calls, and waste ends
early."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness1.config import ChatPolicy, Env
from harness1.errors import InfrastructureFault, Unreadable
from harness1.policy.language_model import FEW, ChatCompletionsPolicy
from harness1.records import StopReason, ToolCall
from harness1.rows.calls import calls_of
from tests.models.test_chat_messages import check
from tests.policy.test_chat_completions import NONSENSE, RESERVE, Answer, Hosted, answer, decided, episode_of
from tests.support import END, search

BODY = json.dumps({"name": "search_corpus", "arguments": {"query": "river"}})


def said(content: Any, finish: str = "stop", **fields: Any) -> Answer:
    return {"choices": [{"message": {"role": "assistant", "content": content, **fields}, "finish_reason": finish}]}


def given_back(hosted: Hosted) -> Answer:
    """The model's first message, as it was sent back."""
    return next(message for message in hosted.asked[1]["messages"] if message["role"] == "assistant")


@pytest.mark.parametrize(
    ("given", "reasoning", "content"),
    [
        (said(f"I look.\n<tool_call>\n{BODY}\n</tool_call>"), "I look.", "I look."),
        (said(f"<think>Hm.</think>```json\n{BODY}\n```"), "Hm.", None),
        (said([{"type": "text", "text": BODY}], tool_calls=[]), "", None),
        (said("", reasoning_content=f"Hm.<|tool_calls_section_begin|>{BODY}"), "Hm.", None),
    ],
)
def test_a_call_in_the_text_is_carried_out_and_goes_back_as_a_call(
    given: Answer, reasoning: str, content: str | None
) -> None:
    hosted = Hosted(given)
    turn = episode_of(hosted).turns[0]
    assert (turn.action, len(turn.calls), turn.calls[0].text) == (search("river"), 1, "")
    assert turn.reasoning.startswith(reasoning)
    check(hosted.asked[1]["messages"])
    back = given_back(hosted)
    assert back["content"] == content
    (listed,) = back["tool_calls"]
    assert (listed["type"], listed["function"]["name"]) == ("function", "search_corpus")
    assert json.loads(listed["function"]["arguments"]) == {"query": "river"}


def test_the_calls_of_the_server_count_before_those_in_the_text() -> None:
    decision, _ = decided(answer(search("war"), content=f"<tool_call>{BODY}</tool_call>"))
    assert decision.actions == (search("war"),)


def test_unknown_fields_go_back_as_they_came() -> None:
    given = answer(search("river"), reasoning_details=[{"type": "reasoning.encrypted", "data": "abc"}])
    message = given["choices"][0]["message"]
    message["tool_calls"][0] |= {"extra_content": {"google": {"thought_signature": "sig"}}}
    message["tool_calls"][0]["function"]["thought"] = None
    hosted = Hosted(given)
    episode_of(hosted)
    back = given_back(hosted)
    assert back["reasoning_details"] == message["reasoning_details"]
    (listed,) = message["tool_calls"]
    del listed["index"]
    assert back["tool_calls"] == [listed]


def test_calls_of_any_form_break_no_episode() -> None:
    for listed in ([{}], [{"function": None}], [{"function": {"name": None}}], [{"id": 3, "function": {"name": ""}}]):
        episode = episode_of(Hosted(*[said(None, tool_calls=listed)] * 9))
        assert episode.stop_reason is StopReason.FORMAT_LIMIT
        assert all(made.text for made in calls_of(episode))


def rooms(hosted: Hosted) -> list[int]:
    return [body["max_tokens"] for body in hosted.asked]


def test_an_attempt_that_was_cut_is_shown_again_and_has_all_of_the_reserve() -> None:
    hosted = Hosted(said(f"{NONSENSE} 1", "length"), said(f"{NONSENSE} 2", "length"), answer(search("river")))
    first, second, _ = episode_of(hosted).turns[0], *hosted.asked[1:3]
    assert rooms(hosted) == [FEW, RESERVE, RESERVE, FEW]
    assert second["messages"][-2] == {"role": "assistant", "content": f"{NONSENSE} 1"}
    assert "too long" in second["messages"][-1]["content"]
    assert f"{NONSENSE} 2" not in json.dumps(hosted.asked), "only the first attempt is shown"
    assert f"{NONSENSE} 1" not in json.dumps(hosted.asked[2:])
    assert [made.sampling.max_tokens for made in first.calls] == [FEW, RESERVE, RESERVE]


def test_a_model_that_thinks_has_all_of_the_reserve_from_then_on() -> None:
    for given in (
        answer(search("river"), reasoning="Hm."),
        said(f"<think>Hm.</think>{BODY}"),
        said(None, "length", reasoning_content="Hm"),
        said("", "length"),
    ):
        hosted = Hosted(given, answer(search("war")))
        episode_of(hosted)
        assert rooms(hosted)[0] == FEW
        assert set(rooms(hosted)[1:]) == {RESERVE}
    hosted = Hosted(answer(search("river"), content="I look."), answer(search("war")))
    episode_of(hosted)
    assert set(rooms(hosted)) == {FEW}


def test_a_setting_bounds_an_attempt() -> None:
    hosted = Hosted(said("So", "length", reasoning="Hm."), answer(search("river")))
    episode_of(hosted, max_tokens=50)
    assert rooms(hosted) == [50, RESERVE, 50]
    plain = ChatCompletionsPolicy(Hosted(), "gpt", RESERVE)
    assert ChatCompletionsPolicy(Hosted(), "gpt", RESERVE, ChatPolicy(max_tokens=0)).hash == plain.hash
    assert ChatCompletionsPolicy(Hosted(), "gpt", RESERVE, ChatPolicy(max_tokens=50)).hash != plain.hash


def test_of_an_answer_that_was_cut_the_whole_calls_count() -> None:
    whole = f"<tool_call>{BODY}</tool_call>\n"
    given = answer(search("river"), ("curate", '{"add_ids": ["D'))
    given["choices"][0]["finish_reason"] = "length"
    for cut in (said(f"{whole}<tool_call>{BODY[:-5]}", "length"), said(f"{whole}\n\n\n", "length"), given):
        decision, hosted = decided(cut)
        assert (decision.actions, len(hosted.asked)) == ((search("river"),), 1)


def test_a_server_that_cannot_read_what_was_cut_is_asked_again_with_more_room() -> None:
    fault = Unreadable("500 Failed to parse tool call arguments as JSON: missing closing quote")
    hosted = Hosted(fault, answer(search("river")))
    episode = episode_of(hosted)
    assert (episode.turns[0].action, rooms(hosted)) == (search("river"), [FEW, RESERVE, RESERVE])
    assert episode.turns[0].calls[0].text == str(fault)
    assert episode_of(Hosted(*[fault] * 9)).stop_reason is StopReason.FORMAT_LIMIT
    assert episode_of(Hosted(InfrastructureFault("500 out of memory"))).stop_reason is StopReason.FAULT


def test_the_record_holds_what_the_model_wrote_in_every_failed_attempt() -> None:
    failed = [said(f"Wrong {at}.", reasoning="So.") for at in range(3)]
    failed.append(answer(("curate", "nonsense"), content="Wrong 3."))
    episode = episode_of(Hosted(*failed))
    texts = [made.text for made in episode.turns[-1].calls]
    assert texts[:3] == [f"So.\nWrong {at}." for at in range(3)]
    assert texts[3].startswith("Wrong 3.\n")
    assert "nonsense" in texts[3]
    assert isinstance(episode.turns[-1].action, ToolCall | None)
    assert episode_of(Hosted(said("x" * 99_999), answer(END))).turns[0].calls[0].text == "x" * 20_000
    assert Env().generation_reserve > FEW
