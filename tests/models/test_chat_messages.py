"""A context as OpenAI's messages: the texts are those of its pieces, and every call of the model is answered."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from harness1.config import Env, Rendering
from harness1.env.pieces import group_messages, piece
from harness1.env.render import Context
from harness1.models.calls import NOT_EXECUTED, Message, Said, messages_of, tools_of, without_limits
from harness1.tools.registry import Toolbox
from tests.support import call, curate, make_env, play, search, text_of

ACTIONS = (search("poet"), curate(add={"D1": "high"}), search("town"), call("no_such_tool", x=1), search("engine"))
ORDERS = ("paper", "stable_first", "epoch", "transcript")


def contexts(order: str, *actions: Any) -> list[Context]:
    """What a policy sees after each action."""
    env = make_env(Env(rendering=Rendering(order=order)))
    shown = [step.context for step in play(env, *(actions or ACTIONS))]
    return [context for context in shown if context is not None]


def said(turn: int, *names: str, executed: int = 0) -> Said:
    """What a model said at a turn: one call for each name, with ids of the server's own."""
    ids = tuple(f"call_{turn}{letter}" for letter in "abc"[: len(names)])
    calls = [
        {"id": made, "type": "function", "function": {"name": name, "arguments": '{"x":  1}'}}
        for made, name in zip(ids, names, strict=True)
    ]
    return Said({"role": "assistant", "content": "Hm.", "tool_calls": calls}, ids, ids[executed])


def check(messages: Sequence[Message]) -> None:
    """What OpenAI demands: a system message first and nowhere else, every call answered at once and once, and no
    answer without its call."""
    assert [message["role"] for message in messages].count("system") == 1
    assert messages[0]["role"] == "system"
    assert messages[-1]["role"] in ("user", "tool")
    asked: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] == asked.pop(0)
            assert message["content"].strip()
            continue
        assert asked == [], "a call has no answer"
        asked = [made["id"] for made in message.get("tool_calls", ())]
        assert len(set(asked)) == len(asked)
        assert message["role"] in ("system", "user", "assistant")
        assert message["role"] == "assistant" or message["content"].strip()
    assert asked == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("known", [(), (1, 2, 3, 4, 5), (2, 4)])
def test_every_call_is_answered_and_texts_are_the_joined_pieces(order: str, known: tuple[int, ...]) -> None:
    spoken = {turn: said(turn, "search_corpus", "curate", executed=turn % 2) for turn in known}
    for context in contexts(order):
        messages = messages_of(context.pieces, spoken)
        check(messages)
        turns = [each.turn_ref for each in context.pieces if each.turn_ref is not None]
        made = [message for message in messages if message["role"] == "assistant"]
        assert len(made) == len(turns)
        for turn, message in zip(turns, made, strict=True):
            assert (message is spoken[turn].message) if turn in known else (message["content"] is None)
        texts = [
            "".join(each.text for each in group)
            for group in group_messages(context.pieces)
            if group[0].turn_ref is None
        ]
        shown = [it["content"] for it in messages if it["role"] != "assistant" and it["content"] != NOT_EXECUTED]
        assert shown == texts
        own = "".join(each.text for each in context.pieces if each.turn_ref is not None)
        assert len("".join(texts)) + len(own) == len(text_of(context))


def test_a_call_that_was_not_carried_out_is_told_so_under_its_own_id() -> None:
    (context,) = contexts("paper", ACTIONS[0])
    spoken = said(1, "end_search", "search_corpus", "curate", executed=1)
    answers = [each for each in messages_of(context.pieces, {1: spoken}) if each["role"] == "tool"]
    assert [each["tool_call_id"] for each in answers] == ["call_1a", "call_1b", "call_1c"]
    assert [each["content"] == NOT_EXECUTED for each in answers] == [True, False, True]
    assert answers[1]["content"].startswith("Turn 1: search_corpus: poet\n")
    assert "[D1] Lord Byron" in answers[1]["content"]


def test_the_call_of_another_policy_is_put_into_words_of_openai() -> None:
    context = contexts("paper")[2]
    calls = [each["tool_calls"] for each in messages_of(context.pieces, {}) if each["role"] == "assistant"]
    function = {"name": "curate", "arguments": '{"add": {"D1": "high"}}'}
    assert calls[1] == [{"id": "turn-2", "type": "function", "function": function}]
    assert [made[0]["function"]["name"] for made in calls] == ["search_corpus", "curate", "search_corpus"]


def test_an_epoch_opens_with_an_observation_that_the_user_says() -> None:
    env = Env(rendering=Rendering(order="epoch", epoch_turns=2))
    shown = [step.context for step in play(make_env(env), *ACTIONS)]
    opened = [each for each in shown if each is not None and all(piece.turn_ref is None for piece in each.pieces)]
    assert opened
    for context in opened:
        messages = messages_of(context.pieces, {turn: said(turn, "search_corpus") for turn in range(1, 6)})
        assert {message["role"] for message in messages} == {"system", "user"}
        (observation,) = [message for message in messages if message["content"].startswith("Turn ")]
        assert observation["role"] == "user"


def test_what_is_no_answer_or_no_call_is_said_in_words() -> None:
    (context,) = contexts("paper", ACTIONS[0])
    messages = messages_of([*context.pieces, piece("turn/2", "tool", "And more.")], {1: said(1, "search_corpus")})
    check(messages)
    assert messages[-1] == {"role": "user", "content": "And more.\n"}
    words = piece("action/1", "assistant", "I search.")
    output = type(words)(words.key, words.role, words.text, 1)
    messages = messages_of([output if each.turn_ref is not None else each for each in context.pieces], {})
    check(messages)
    assert {"role": "assistant", "content": "I search.\n"} in messages
    assert "tool" not in [message["role"] for message in messages]


def test_a_server_is_told_no_limits_of_a_schema_for_which_its_grammar_would_be_too_long() -> None:
    handles = {"type": "array", "items": {"type": "string", "maxLength": 500}, "maxItems": 256, "minItems": 1}
    schema = {"anyOf": [handles, {"type": "object", "properties": {"maxItems": handles}, "maxProperties": 9}]}
    kept = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    assert without_limits(schema) == {"anyOf": [kept, {"type": "object", "properties": {"maxItems": kept}}]}
    sent = msgspec.json.encode(without_limits(tools_of(Toolbox.of(Env()).specs))).decode()
    assert "add_ids" in sent
    assert not re.search(r'"max[A-Z]', sent)
