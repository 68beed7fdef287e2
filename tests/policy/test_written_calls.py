"""`policy.constrained` behind a chat server: the tools and an example in words, and a schema of one valid call."""

from __future__ import annotations

import json
from typing import Any

from harness1.config import Env, Rendering, load_config
from harness1.models.written_calls import EXAMPLES, declare, response_format, write_example, write_messages
from harness1.policy.language_model import INSTRUCTION
from harness1.policy.registry import open_policy
from harness1.records import StopReason, Task, ToolCall
from harness1.tools.registry import Toolbox
from tests.policy.test_chat_completions import TASK, Answer, Hosted, answer, decided, episode_of
from tests.support import END, call, make_env, run, search, text_of, wide_corpus

SPECS = Toolbox.of(Env()).specs
LOCAL = load_config("local").env


def said(each: ToolCall) -> Answer:
    return answer(content=json.dumps({"name": each.name, "arguments": each.arguments}))


def allowed(turn: int) -> dict[str, Any]:
    schema = response_format(SPECS, turn)["json_schema"]["schema"]
    return {each["properties"]["name"]["const"]: each["properties"]["arguments"] for each in schema["anyOf"]}


def test_a_request_has_a_schema_of_calls_in_place_of_tools() -> None:
    hosted = Hosted(said(search("poet")), said(call("curate", add_ids=["D1"])), said(END))
    episode = episode_of(hosted, constrained=True)
    assert episode.stop_reason is StopReason.END_SEARCH
    assert [turn.action for turn in episode.turns] == [search("poet"), call("curate", add_ids=["D1"]), END]
    first, second, _ = hosted.asked
    assert not {"tools", "tool_choice"} & first.keys()
    assert first["response_format"] == json.loads(json.dumps(response_format(SPECS, 1)))
    assert [each["role"] for each in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == '{"name": "search_corpus", "arguments": {"query": "poet"}}'


def test_no_two_messages_in_a_row_have_one_role_after_failed_attempts_either() -> None:
    _, hosted = decided(answer(content="No."), answer(content=""), said(search("poet")), constrained=True)
    assert [[each["role"] for each in body["messages"]] for body in hosted.asked] == [["system", "user"]] * 3
    first, second = (body["messages"][1]["content"] for body in hosted.asked[:2])
    assert second.startswith(first)
    assert INSTRUCTION in second


def test_the_schema_holds_calls_to_what_a_turn_may_use_and_lets_none_go_on_for_ever() -> None:
    assert allowed(1).keys() == {spec.name for spec in SPECS} - {"end_search"}
    assert allowed(2).keys() == {spec.name for spec in SPECS}
    assert allowed(1)["fan_out_search"]["properties"]["queries"]["maxItems"] == 5
    assert allowed(1)["search_corpus"]["properties"]["query"]["maxLength"] == 120
    assert "maxProperties" not in json.dumps(allowed(2))


def test_the_tools_are_told_by_calls_in_which_small_models_find_nothing_to_copy() -> None:
    lines = declare(SPECS).splitlines()
    assert '{"name": "fan_out_search", "arguments": {"queries": ["..."]}}' in lines
    assert '{"name": "end_search", "arguments": {}}' in lines
    text = write_messages(run(make_env().reset(TASK)).pieces, SPECS)[0]["content"]
    assert text.startswith(declare(SPECS))
    assert text.endswith(write_example(SPECS))


def test_the_example_is_of_a_tool_that_is_offered_and_its_calls_are_valid() -> None:
    for name, calls in EXAMPLES.items():
        only = tuple(spec for spec in SPECS if spec.name in (name, "end_search"))
        assert write_example(only).count(f'"{name}"') == len(calls) == 2
        env = make_env(Env(), wide_corpus(20))
        run(env.reset(TASK))
        for arguments in calls:
            assert run(env.step([call(name, **arguments)])).observation.error is None
    assert write_example([spec for spec in SPECS if spec.name not in EXAMPLES]) == ""


def test_plain_instructions_show_a_small_model_the_question_alone_and_then_leads_by_name() -> None:
    env = make_env(LOCAL, wide_corpus(20))
    first = text_of(run(env.reset(Task("t", "Which king met “the lady of the lake”?"))))
    assert first.endswith("Question: Which king met “the lady of the lake”?\nTurn 0/2\n")
    second = text_of(run(env.step([search("castle")])).context)
    assert "Search next: the lady of the lake" in second
    assert "named in the question" not in second
    shown = make_env(Env(rendering=Rendering(instructions="plain")), wide_corpus(20))
    assert "Curated 0/30" not in text_of(run(shown.reset(TASK)))


def test_the_local_configuration_is_for_chat_servers() -> None:
    config = load_config("local")
    assert config.policy.constrained
    assert config.env.prompt_limit < 8192
    assert [*Toolbox.of(config.env).tools] == ["fan_out_search", "end_search"]
    open_policy("openai:m@http://127.0.0.1:1/v1", None, config)
