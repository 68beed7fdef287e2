"""fan_out_search: all queries at once, fused by rank over all of them."""

from __future__ import annotations

import pytest

from harness1.config import AutoPopulate, Env, FanOut
from harness1.records import Note, Observation
from harness1.retrieval.protocol import rrf
from tests.support import WordRetriever, call, chunk, make_env, play

CHUNKS = [chunk(f"x{n}", f"alpha {n}", f"X{n}") for n in range(6)]
CHUNKS += [chunk(f"y{n}", f"beta {n}", f"Y{n}") for n in range(6)]
CHUNKS += [chunk("z", "alpha beta gamma", "Z")]


def fan_out(*queries: object, env: Env | None = None) -> Observation:
    step = play(make_env(env, CHUNKS), call("fan_out_search", queries=list(queries)))[0]
    assert step.observation is not None
    return step.observation


def test_the_order_is_the_fusion_of_all_queries() -> None:
    found = fan_out("alpha", "beta")
    order = [chunk_id for chunk_id, _ in rrf([ranking.chunk_ids for ranking in found.rankings], 60)]
    assert [hit.chunk_id for hit in found.hits] == order
    assert found.hits[0].doc_id == "z"


def test_the_first_documents_come_from_every_query() -> None:
    first = Env(auto_populate=AutoPopulate(documents=5, by="first"))
    seeded = fan_out("alpha", "beta", env=first).delta.auto_populated
    assert seeded[0] == "z"
    assert {unit[0] for unit in seeded[1:]} == {"x", "y"}


def test_handles_follow_the_fused_order() -> None:
    env = make_env(chunks=CHUNKS)
    play(env, call("fan_out_search", queries=["alpha", "beta"]))
    assert next(iter(env.state.memory.pool.entries.values())).unit_id == "z"


def test_queries_beyond_the_limit_are_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FanOut, "queries", 2)
    found = fan_out("alpha", "beta", "gamma")
    assert [ranking.query for ranking in found.rankings] == ["alpha", "beta"]
    assert Note("queries_left_out", {"count": 1, "limit": 2}) in found.notes


def test_blank_and_repeated_queries_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FanOut, "queries", 2)
    found = fan_out(" ", "alpha", "", "alpha ", "beta")
    assert [ranking.query for ranking in found.rankings] == ["alpha", "beta"]


def test_no_query_at_all_is_told() -> None:
    assert fan_out().error == fan_out("", " ").error == Note("empty_query")
    assert fan_out("alpha", 3).error is not None


def test_the_allowance_grows_with_the_queries_and_stays_in_the_window() -> None:
    env = Env()
    assert env.observation_limit(5 * env.search.tokens) == int(0.4 * env.prompt_limit)
    assert env.observation_limit(env.search.tokens) == env.search.tokens


def test_one_query_alone_keeps_the_order_of_the_engine() -> None:
    retriever = WordRetriever(CHUNKS)
    step = play(make_env(retriever=retriever), call("fan_out_search", queries=["alpha"]))[0]
    assert step.observation is not None
    assert tuple(hit.chunk_id for hit in step.observation.hits) == step.observation.rankings[0].chunk_ids


def test_a_call_may_take_fewer_hits_of_each_query_than_a_search_does() -> None:
    env = Env(fan_out=FanOut(hits=1))
    found = fan_out("alpha", "beta", env=env)
    assert [len(ranking.chunk_ids) for ranking in found.rankings] == [1, 1]
    single = play(make_env(env, CHUNKS), call("search_corpus", query="alpha"))[0].observation
    assert single is not None
    assert len(single.hits) > 1
    assert len(fan_out("alpha").hits) == len(single.hits)
