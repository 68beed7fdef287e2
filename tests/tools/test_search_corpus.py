"""search_corpus: whole hits, each chunk once an episode, the first ones curated once."""

from __future__ import annotations

from harness1.config import AutoPopulate, Compression, Curation, Env, Search
from harness1.env.environment import Step
from harness1.records import Note, Observation, Task
from tests.support import WordRetriever, call, chunk, curate, make_env, play, run, search, text_of

LONG = [chunk(f"d{n}", f"common text {n} " + "word " * 400, f"T{n}") for n in range(8)]
WHOLE = Compression(on=False)


def observed(step: Step) -> Observation:
    assert step.observation is not None
    return step.observation


def test_a_chunk_that_was_returned_does_not_come_back() -> None:
    steps = play(make_env(), search("Ada Lovelace"), search("Ada Lovelace"), search("Ada Byron"))
    assert [{hit.doc_id for hit in observed(step).hits} for step in steps] == [{"ada", "babbage"}, set(), {"byron"}]
    assert Note("nothing_found") in observed(steps[1]).notes


def test_hits_that_do_not_fit_are_left_whole_for_a_later_search() -> None:
    env = make_env(Env(search=Search(tokens=1200), compression=WHOLE), LONG)
    steps = play(env, search("common"), search("common"), search("common"), search("common"))
    assert [len(observed(step).hits) for step in steps] == [2, 2, 2, 2]
    assert Note("hits_left_out", {"count": 6}) in observed(steps[0]).notes
    assert len(env.state.memory.store) == 8
    assert all(hit.text.strip() in text_of(steps[0].context) for hit in observed(steps[0]).hits)


def test_a_hit_that_fits_follows_one_that_does_not_and_the_first_always_stays() -> None:
    chunks = [
        chunk("a", "common " + "long " * 900),
        chunk("b", "common " + "long " * 700),
        chunk("c", "common short"),
    ]
    env = make_env(Env(search=Search(tokens=1000), compression=WHOLE), chunks)
    assert [hit.doc_id for hit in observed(play(env, search("common"))[0]).hits] == ["a"]
    env = make_env(Env(search=Search(tokens=1300), compression=WHOLE), chunks)
    assert [hit.doc_id for hit in observed(play(env, search("common"))[0]).hits] == ["a", "c"]


def test_compression_shows_the_nearest_sentences_and_stores_the_text() -> None:
    text = " ".join(f"Sentence number {n} says little." for n in range(20)) + " The castle fell at last."
    env = make_env(Env(compression=Compression(sentences=2)), [chunk("a", text, "T")])
    step = play(env, search("castle fell number"))[0]
    shown = text_of(step.context).partition("[D1]")[2]
    assert "The castle fell at last." in shown
    assert "Sentence number 7" not in shown
    assert env.state.memory.store[observed(step).hits[0].chunk_id].text == text


def test_the_first_successful_search_fills_an_empty_set_once() -> None:
    chunks = [chunk(f"d{n}", f"common {n}", f"T{n}") for n in range(12)]
    env = make_env(Env(auto_populate=AutoPopulate(documents=3, by="first")), chunks)
    steps = play(env, search("nowhere"), search("common"), curate(remove_ids=["D1", "D2", "D3"]), search("common"))
    assert [observed(step).delta.auto_populated for step in steps] == [(), ("d0", "d1", "d10"), (), ()]
    env = make_env(Env(auto_populate=AutoPopulate(documents=3, by="first")), chunks)
    play(env, search("common"))
    assert env.state.memory.curated.tags == {"d0": "fair", "d1": "fair", "d10": "fair"}


def test_what_the_policy_curated_first_is_not_added_to() -> None:
    env = make_env()
    steps = play(env, call("grep_corpus", pattern="Greece"), curate(add_ids=["D1"]), search("Ada"))
    assert observed(steps[2]).delta.auto_populated == ()
    assert list(env.state.memory.curated.tags) == ["miss"]


def test_without_tags_the_first_documents_are_equal_to_all_others() -> None:
    env = make_env(Env(curation=Curation(tags=False), auto_populate=AutoPopulate(documents=1, by="first")))
    play(env, search("Ada"), curate(add_ids=["D2"]))
    assert len(set(env.state.memory.curated.tags.values())) == 1


def test_chunks_are_the_unit_where_the_corpus_says_so() -> None:
    chunks = [chunk("a", f"common part {n}", "T", n) for n in range(3)]
    env = make_env(retriever=WordRetriever(chunks, "chunk"))
    play(env, search("common"), curate(remove_ids=["D1.2"]))
    assert list(env.state.memory.curated.tags) == ["a#0", "a#2"]


def test_an_empty_query_is_told_and_costs_no_search() -> None:
    retriever = WordRetriever(LONG)
    env = make_env(retriever=retriever)
    for query in ("", " \n\t"):
        assert observed(play(env, search(query))[0]).error == Note("empty_query")
    assert retriever.calls == 0


def test_white_space_of_a_query_is_put_in_order() -> None:
    env = make_env()
    run(env.reset(Task("t", "q")))
    step = run(env.step([search(" Ada\n Lovelace ")]))
    assert observed(step).rankings[0].query == "Ada Lovelace"


def test_shown_sentences_may_be_cut_between_words() -> None:
    text = "The tower of the old harbour was painted red by sailors."
    for most, shown in ((0, text), (len(text), text), (23, "The tower of the old ..."), (3, "The ..."), (2, "Th ...")):
        env = make_env(Env(compression=Compression(characters=most)), [chunk("a", text, "T")])
        step = play(env, call("search_corpus", query="tower"))[0]
        assert step.context is not None
        assert step.context.view.documents["D1"].text == shown
        assert step.observation is not None
        assert step.observation.hits[0].text == text
