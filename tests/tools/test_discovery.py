"""search_corpus: whole hits, each chunk once an episode, the first ones curated once."""

from __future__ import annotations

from typing import Any

from harness1.config import AutoPopulate, Compression, Env, FanOut, Search
from harness1.records import Note, Observation
from harness1.retrieval.protocol import rrf
from tests.support import WordRetriever, call, chunk, curate, make_env, play, search, text_of

LONG = [chunk(f"d{n}", f"common text {n} " + "word " * 400, f"T{n}") for n in range(8)]


def test_a_chunk_that_was_returned_does_not_come_back() -> None:
    steps = play(make_env(), search("Ada Lovelace"), search("Ada Lovelace"), search("Ada Byron"))
    assert [{hit.doc_id for hit in step.observation.hits} for step in steps] == [{"ada", "babbage"}, set(), {"byron"}]
    assert Note("nothing_found") in steps[1].observation.notes


def test_hits_that_do_not_fit_are_left_whole_for_a_later_search() -> None:
    env = make_env(Env(search=Search(tokens=1200)).switch(compression=False), LONG)
    steps = play(env, *[search("common")] * 4)
    assert [len(step.observation.hits) for step in steps] == [2, 2, 2, 2]
    assert Note("hits_left_out", {"count": 6}) in steps[0].observation.notes
    assert len(env.state.memory.store) == 8
    assert all(hit.text.strip() in text_of(steps[0].context) for hit in steps[0].observation.hits)


def test_a_hit_that_fits_follows_one_that_does_not_and_the_first_always_stays() -> None:
    chunks = [chunk("a", "common " + "long " * 900), chunk("b", "common " + "long " * 700), chunk("c", "common short")]
    for tokens, fitting in ((1000, ["a"]), (1300, ["a", "c"])):
        env = make_env(Env(search=Search(tokens=tokens)).switch(compression=False), chunks)
        assert [hit.doc_id for hit in play(env, search("common"))[0].observation.hits] == fitting


def test_compression_shows_the_sentences_nearest_to_query_or_pattern_and_stores_the_text() -> None:
    text = " ".join(f"Sentence number {n} says little." for n in range(20)) + " The castle fell at last."
    env = make_env(Env(compression=Compression(sentences=2)), [chunk("a", text, "T")])
    step = play(env, search("castle fell number"))[0]
    shown = text_of(step.context).partition("[D1]")[2]
    assert "The castle fell at last." in shown
    assert "Sentence number 7" not in shown
    assert env.state.memory.store[step.observation.hits[0].chunk_id].text == text
    filler = "Sentence number something says nothing. " * 6
    env = make_env(chunks=[chunk("k", f"{filler} Lord Kelvin spoke there in 1892. The hall was full.")])
    context = play(env, call("grep_corpus", pattern=r"(?i)\bkelvin\b.{0,20}1892"))[-1].context
    assert "Lord Kelvin spoke there in 1892." in text_of(context)


def test_the_first_successful_search_fills_an_empty_set_once() -> None:
    chunks = [chunk(f"d{n}", f"common {n}", f"T{n}") for n in range(12)]
    env = make_env(Env(auto_populate=AutoPopulate(documents=3, by="first")), chunks)
    actions = search("nowhere"), search("common"), curate(remove_ids=["D1", "D2", "D3"]), search("common")
    found = [step.observation.delta.auto_populated for step in play(env, *actions)]
    assert found == [(), ("d0", "d1", "d10"), (), ()]
    play(env, search("common"))
    assert env.state.memory.curated.tags == {"d0": "fair", "d1": "fair", "d10": "fair"}
    env = make_env()
    steps = play(env, call("grep_corpus", pattern="Greece"), curate(add_ids=["D1"]), search("Ada"))
    assert not any(step.observation.delta.auto_populated for step in steps), "the policy curated first"
    assert list(env.state.memory.curated.tags) == ["miss"]


def test_chunks_are_the_unit_where_the_corpus_says_so() -> None:
    env = make_env(retriever=WordRetriever([chunk("a", f"common part {n}", "T", n) for n in range(3)], "chunk"))
    play(env, search("common"), curate(remove_ids=["D1.2"]))
    assert list(env.state.memory.curated.tags) == ["a#0", "a#2"]


def test_an_empty_query_is_told_and_costs_no_search() -> None:
    retriever = WordRetriever(LONG)
    env = make_env(retriever=retriever)
    for query in ("", " \n\t"):
        assert play(env, search(query))[0].observation.error == Note("empty_query")
    assert retriever.calls == 0
    assert play(make_env(), search(" Ada\n Lovelace "))[0].observation.rankings[0].query == "Ada Lovelace"


def test_shown_sentences_may_be_cut_between_words() -> None:
    text = "The tower of the old harbour was painted red by sailors."
    for most, shown in ((0, text), (len(text), text), (23, "The tower of the old ..."), (3, "The ..."), (2, "Th ...")):
        env = make_env(Env(compression=Compression(characters=most)), [chunk("a", text, "T")])
        (step,) = play(env, search("tower"))
        assert (step.context.view.documents["D1"].text, step.observation.hits[0].text) == (shown, text)


CHUNKS = [chunk(f"{word[0]}{n}", f"{word} {n}", f"{word} {n}") for word in ("alpha", "beta") for n in range(6)]
CHUNKS += [chunk("z", "alpha beta gamma", "Z")]


def fan_out(*queries: object, env: Env | None = None) -> Observation:
    return play(make_env(env, CHUNKS), call("fan_out_search", queries=list(queries)))[0].observation


def test_the_order_is_the_fusion_of_all_queries() -> None:
    env = make_env(Env(auto_populate=AutoPopulate(documents=5, by="first")), CHUNKS)
    found = play(env, call("fan_out_search", queries=["alpha", "beta"]))[0].observation
    order = [chunk_id for chunk_id, _ in rrf([ranking.chunk_ids for ranking in found.rankings], 60)]
    assert [hit.chunk_id for hit in found.hits] == order
    first, *others = found.delta.auto_populated
    assert first == next(iter(env.state.memory.pool.entries)) == "z", "handles follow the fused order"
    assert {unit[0] for unit in others} == {"a", "b"}, "the first documents come from every query"
    alone = fan_out("alpha")
    assert tuple(hit.chunk_id for hit in alone.hits) == alone.rankings[0].chunk_ids


def test_queries_beyond_the_limit_are_told_and_blank_and_repeated_ones_do_not_count(monkeypatch: Any) -> None:
    monkeypatch.setattr("harness1.tools.discovery.MOST_QUERIES", 2)
    for queries, left in ((("alpha", "beta", "gamma"), 1), ((" ", "alpha", "", "alpha ", "beta"), 0)):
        found = fan_out(*queries)
        assert [ranking.query for ranking in found.rankings] == ["alpha", "beta"]
        assert (Note("queries_left_out", {"count": 1, "limit": 2}) in found.notes) == left


def test_no_query_at_all_is_told_and_the_allowance_grows_with_the_queries() -> None:
    assert fan_out().error == fan_out("", " ").error == Note("empty_query")
    assert fan_out("alpha", 3).error is not None
    env = Env()
    assert env.observation_limit(5 * env.search.tokens) == int(0.4 * env.prompt_limit)
    assert env.observation_limit(env.search.tokens) == env.search.tokens


def test_a_call_may_take_fewer_hits_of_each_query_than_a_search_does() -> None:
    env = Env(fan_out=FanOut(hits=1))
    assert [len(ranking.chunk_ids) for ranking in fan_out("alpha", "beta", env=env).rankings] == [1, 1]
    single = play(make_env(env, CHUNKS), search("alpha"))[0].observation
    assert len(fan_out("alpha").hits) == len(single.hits) > 1


def test_matches_enter_pool_and_store_are_not_searched_again_and_fill_no_empty_set() -> None:
    env = make_env()
    grepped, searched = play(env, call("grep_corpus", pattern="Missolonghi"), search("Byron Ada"))
    assert list(env.state.memory.pool.entries)[:2] == ["byron", "miss"]
    assert "byron" not in {hit.doc_id for hit in searched.observation.hits}
    assert not grepped.observation.delta.auto_populated
    assert searched.observation.delta.auto_populated, "the next search still does"
    many = make_env(chunks=[chunk(f"d{n}", f"common {n}") for n in range(9)])
    assert len(play(many, call("grep_corpus", pattern="common"))[0].observation.hits) == 5


def test_a_bad_or_an_empty_pattern_is_an_observation_and_no_match_is_another() -> None:
    env = make_env()
    bad, empty, none = play(env, *(call("grep_corpus", pattern=pattern) for pattern in ("(", "  ", "zzz")))
    assert bad.observation.error.code == "bad_pattern"
    assert "is not usable" in text_of(bad.context)
    assert empty.observation.error == Note("empty_pattern")
    assert Note("nothing_found") in none.observation.notes
    assert not env.state.memory.pool.entries
