"""One history line for each action, short whatever the action was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness1.config import AutoPopulate, Env, History
from harness1.memory.parts import SUBJECT_CHARACTERS, Pool, history_line, subject
from harness1.records import Observation, ToolCall
from tests.support import call, curate, hit, make_env, play, search

_JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=4)


@given(st.dictionaries(st.sampled_from(["query", "queries", "doc_ids", "claim", "other"]), _JSON, max_size=3))
def test_a_subject_is_one_short_line(arguments: dict[str, object]) -> None:
    words = subject(ToolCall("search_corpus", arguments))
    assert len(words) <= SUBJECT_CHARACTERS
    assert len(words.splitlines()) <= 1


def test_a_subject_is_the_argument_that_matters() -> None:
    assert subject(search("Byron  died\nwhere")) == "Byron died where"
    assert subject(call("fan_out_search", queries=["a" * 40, "b", "c", "d"])) == f"{'a' * 30}; b; c"
    assert subject(call("verify", doc_ids=["D1"], claim="It rained.")) == "It rained."
    assert subject(curate(add_ids=[], remove_ids=["D4"])) == "D4"
    assert subject(ToolCall("search_corpus")) == ""


def test_a_line_counts_units_returned_new_and_curated() -> None:
    env = make_env(Env(auto_populate=AutoPopulate(by="first")))
    play(env, search("Ada Lovelace"), search("Ada Byron"), curate(add_ids=["D3"]))
    lines = env.state.memory.history
    assert [(line.turn, line.returned, line.new, line.curated) for line in lines] == [
        (1, 2, 2, 2),
        (2, 1, 1, 0),
        (3, 0, 0, 1),
    ]


def test_where_chunks_are_curated_chunks_are_counted() -> None:
    found = Observation("search_corpus", (hit("a", "x", index=0), hit("a", "y", index=1)))
    assert history_line(1, Pool("chunk"), search("x"), found).returned == 2
    assert history_line(1, Pool("document"), search("x"), found).returned == 1


def test_a_huge_tool_name_does_not_fill_the_history() -> None:
    env = make_env()
    play(env, ToolCall("x\n" * 100_000))
    assert len(env.state.memory.history[0].tool) <= 40


def test_without_history_no_line_is_kept() -> None:
    env = make_env(Env(history=History(on=False)))
    play(env, search("Ada"))
    assert env.state.memory.history == []
