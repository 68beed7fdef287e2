"""Guidance states facts, and only in prescriptive mode orders; it never speaks where it is off."""

from __future__ import annotations

from typing import Any

import pytest

from harness1.config import AutoPopulate, Env, History, Verification
from harness1.env.pieces import SENTENCES, sentence
from harness1.records import Note, ToolCall
from tests.support import WordRetriever, call, curate, make_env, play, search, wide_corpus

UNSEEDED = AutoPopulate(on=False)


def codes(*actions: ToolCall, guidance: Any = "facts", **options: Any) -> list[list[str]]:
    """The codes of the notes of each turn."""
    retriever = WordRetriever(wide_corpus(30))
    steps = play(make_env(Env(guidance=guidance, **options), retriever=retriever), *actions)
    return [[note.code for note in step.observation.notes] if step.observation else [] for step in steps]


def test_facts_follow_a_discovery() -> None:
    assert codes(search("river")) == [["result", "refilled"]]
    assert codes(search("river"), auto_populate=AutoPopulate(by="first")) == [["result", "seeded"]]
    assert codes(search("river"), auto_populate=UNSEEDED) == [["result", "curated_empty"]]


def test_counts_are_those_of_the_memory() -> None:
    env = make_env()
    step = play(env, search("Ada Lovelace"))[0]
    assert step.observation is not None
    assert step.observation.notes[0] == Note("result", {"returned": 2, "new": 2, "pool": 2, "curated": 2, "cap": 30})


def test_using_one_tool_only_is_told_from_the_third_turn() -> None:
    turns = codes(search("river"), search("war"), search("king"), curate(add_ids=["D9"]))
    assert ["single_tool" in turn for turn in turns] == [False, False, True, False]


def test_orders_come_in_prescriptive_mode_alone() -> None:
    actions = (search("river"), search("war"), curate(add_ids=["D9"]), search("king"), *[search("rain")] * 3)
    orders = {"curate_now", "curate_overdue", "verify_now", "finish"}
    facts = codes(*actions)
    assert not orders & {code for turn in facts for code in turn}
    prescriptive = codes(*actions, guidance="prescriptive")
    assert "curate_now" in prescriptive[0]
    assert "curate_overdue" in prescriptive[1]
    assert not orders & set(prescriptive[2])
    assert "verify_now" in prescriptive[5]
    assert codes(*actions, guidance="none") == [[]] * 7


@pytest.mark.parametrize("guidance", ["facts", "prescriptive"])
def test_guidance_does_not_need_the_history(guidance: str) -> None:
    actions = (search("river"), search("war"), search("king"), curate(add_ids=["D9"]), search("king"), search("rain"))
    without = codes(*actions, guidance=guidance, history=History(on=False))
    assert without == codes(*actions, guidance=guidance)
    assert "single_tool" in without[2]
    assert ("curate_overdue" in without[2]) == (guidance == "prescriptive")


def test_a_verified_set_is_not_asked_to_be_verified() -> None:
    verify = call("verify", doc_ids=["D1"], claim="The river has a castle.")
    actions = (search("river"), verify, *[search("war")] * 6)
    assert not any("verify_now" in turn for turn in codes(*actions, guidance="prescriptive"))
    off = codes(*actions, guidance="prescriptive", verification=Verification(on=False))
    assert not any("verify_now" in turn for turn in off)


def test_the_last_turns_are_announced() -> None:
    turns = codes(*[search("x")] * 7, guidance="prescriptive", max_turns=8)
    assert ["finish" in turn for turn in turns] == [False, False, True, True, True, True, True]


def test_an_error_is_not_followed_by_guidance() -> None:
    assert codes(search(" "), guidance="prescriptive") == [[]]


@pytest.mark.parametrize("code", sorted(SENTENCES))
def test_every_sentence_can_be_filled(code: str) -> None:
    gaps = {"reason", "parameters", "name", "tools", "handles", "count", "tags", "characters", "limit", "parts", "tag"}
    gaps |= {"handle", "returned", "new", "pool", "curated", "cap", "tool", "turns", "uncurated", "left", "text"}
    words = sentence(Note(code, {gap: ["{a}", "b\nc"] for gap in gaps}))
    assert words.endswith(".") or code in ("said", "answered", "tool_error")  # the words of others' tools
    assert "b" in words or "{" not in SENTENCES[code]
