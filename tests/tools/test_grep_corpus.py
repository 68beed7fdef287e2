"""grep_corpus: documents by pattern; they enter the memory, but fill no empty set."""

from __future__ import annotations

from harness1.config import Compression, Env
from harness1.records import Note
from tests.support import call, chunk, make_env, play, search, text_of


def test_matches_enter_pool_and_store_and_are_not_searched_again() -> None:
    env = make_env()
    steps = play(env, call("grep_corpus", pattern="Missolonghi"), search("Byron Ada"))
    assert list(env.state.memory.pool.entries)[:2] == ["byron", "miss"]
    assert steps[1].observation is not None
    assert "byron" not in {hit.doc_id for hit in steps[1].observation.hits}


def test_matches_fill_no_empty_set_and_the_next_search_still_does() -> None:
    steps = play(make_env(), call("grep_corpus", pattern="Missolonghi"), search("Ada"))
    assert [bool(step.observation and step.observation.delta.auto_populated) for step in steps] == [False, True]


def test_at_most_so_many_matches_come() -> None:
    chunks = [chunk(f"d{n}", f"common {n}") for n in range(9)]
    step = play(make_env(chunks=chunks), call("grep_corpus", pattern="common"))[0]
    assert step.observation is not None
    assert len(step.observation.hits) == 5


def test_the_sentence_that_holds_the_words_is_shown() -> None:
    text = " ".join(f"Sentence number {n} says little." for n in range(20)) + " A man called Zamenhof came."
    env = make_env(Env(compression=Compression(sentences=1)), [chunk("a", text)])
    assert "called Zamenhof came." in text_of(play(env, call("grep_corpus", pattern="Zamenhof"))[0].context)


def test_a_bad_pattern_is_an_observation_with_its_reason() -> None:
    env = make_env()
    step = play(env, call("grep_corpus", pattern="("))[0]
    assert step.observation is not None
    assert step.observation.error is not None
    assert step.observation.error.code == "bad_pattern"
    assert "is not usable" in text_of(step.context)
    assert not env.state.memory.pool.entries


def test_an_empty_pattern_and_no_match_are_told_apart() -> None:
    steps = play(make_env(), call("grep_corpus", pattern="  "), call("grep_corpus", pattern="zzz"))
    assert steps[0].observation is not None
    assert steps[1].observation is not None
    assert steps[0].observation.error == Note("empty_pattern")
    assert Note("nothing_found") in steps[1].observation.notes


def test_the_sentence_that_matches_the_pattern_is_shown() -> None:
    filler = " ".join(
        f"Sentence number {word} says nothing." for word in ("one", "two", "three", "four", "five", "six")
    )
    corpus = [chunk("k", f"{filler} Lord Kelvin spoke there in 1892. The hall was full.")]
    env = make_env(chunks=corpus)
    context = play(env, call("grep_corpus", pattern=r"(?i)\bkelvin\b.{0,20}1892"))[-1].context
    assert "Lord Kelvin spoke there in 1892." in text_of(context)
