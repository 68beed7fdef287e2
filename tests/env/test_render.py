"""A context shows the live state, in bounded space, and remembers nothing that could change a result."""

from __future__ import annotations

import msgspec

from harness1.config import AutoPopulate, Dedup, Env, Evidence, History, PoolView, Rendering
from harness1.env.render import visible_units
from harness1.env.view import CuratedView
from harness1.records import Task
from tests.support import call, chunk, curate, make_env, play, run, search, text_of, wide_corpus

PLAIN = Env(evidence=Evidence(rank=False))


def test_an_empty_memory_is_shown_as_such() -> None:
    context = run(make_env().reset(Task("t", "Where  did\nByron die?")))
    assert context is not None
    text = text_of(context)
    assert "Question: Where did Byron die?\n" in text
    assert "Curated 0/30. Nothing yet.\n" in text
    assert context.view.query == "Where did Byron die?"
    assert context.tools == make_env().toolbox.specs


def test_documents_in_recent_hits_need_no_line_of_their_own() -> None:
    env = make_env(PLAIN)
    steps = play(env, search("Ada Lovelace"), *[curate(add_ids=["D1"])] * 5)
    assert "\nD1 (fair)" not in text_of(steps[0].context)
    assert "\nD1 (fair) Ada Lovelace: Ada Lovelace wrote" in text_of(steps[-1].context)
    assert visible_units(env.state.turns[:1]) == {"ada", "babbage"}
    assert visible_units(env.state.turns[-5:]) == set()


def test_pool_lines_come_newest_first_with_a_snippet_then_handles_alone() -> None:
    chunks = [chunk(f"d{number}", f"common word {number} " + "x" * 300, f"Title {number}") for number in range(9)]
    config = msgspec.structs.replace(
        PLAIN,
        pool=PoolView(lines=2, older=3, snippet=20),
        dedup=Dedup(on=False),
        rendering=Rendering(recent=1),
        auto_populate=AutoPopulate(on=False),
    )
    steps = play(make_env(config, chunks), search("common"), curate(remove_ids=["D1"]))
    text = text_of(steps[-1].context)
    assert "\nD9 Title 8: common word 8 xxxxxx\nD8 Title 7:" in text
    assert "\nOlder: D7, D6, D5 (+4 more)\n" in text
    assert "Pool: 9 documents, 9 not curated." in text


def test_hits_say_which_queries_found_them() -> None:
    step = play(make_env(), call("fan_out_search", queries=["Byron", "Ada"]))[0]
    text = text_of(step.context)
    assert "q1: Byron\nq2: Ada\n" in text
    assert "[D1] Ada Lovelace q1#1 q2#1\n" in text


def test_a_hidden_copy_is_mentioned_beside_its_representative() -> None:
    text = "Missolonghi is a town in western Greece, on the north shore of the gulf."
    chunks = [chunk(name, text, "Missolonghi") for name in "abc"]
    step = play(make_env(chunks=chunks), search("town"))[0]
    shown = text_of(step.context)
    assert "[D1] Missolonghi also: 2 copies\n" in shown
    assert "Hidden copies of: D1." in shown
    assert "2 near duplicates hidden" in shown
    assert "D2" not in shown.partition("Question")[2]


def test_later_parts_of_a_document_carry_their_number() -> None:
    chunks = [chunk("a", "first part", "A"), chunk("a", "second part", "A", 1)]
    env = make_env(chunks=chunks)
    steps = play(env, search("second"), search("first"))
    assert "[D1.2] A\nsecond part\n" in text_of(steps[0].context)
    assert "[D1.1] A\nfirst part\n" in text_of(steps[1].context)


def test_history_shows_its_last_lines_and_counts_the_others() -> None:
    env = make_env(Env(history=History(lines=2)))
    context = play(env, search("Ada"), search("Byron"), search("town"))[-1].context
    text = text_of(context)
    assert "History, 1 earlier turns left out:\nT2 search_corpus (Byron): returned" in text
    assert context is not None
    assert [line.turn for line in context.view.history.lines] == [2, 3]


def test_shared_entities_are_shown_with_handles() -> None:
    text = text_of(play(make_env(PLAIN), search("Ada Byron town"))[-1].context)
    assert "Shared entities: Ada Lovelace (D1, D" in text


def test_the_curated_list_survives_when_everything_else_is_dropped() -> None:
    env = make_env(Env(context_window=3000, generation_reserve=300), wide_corpus(40))
    tags = {"D1": "very_high", "D2": "low"}
    steps = play(
        env, search("river"), curate(add_ids=list(tags), importance=tags), *map(search, ("war", "king", "Rome"))
    )
    context = steps[-1].context
    assert context is not None
    assert context.budget.dropped > 0
    assert context.view.curated[0] == CuratedView(
        "D1", env.state.memory.pool.entries[context.view.curated[0].unit_id].unit_id, "very_high"
    )
    assert len(context.view.curated) == len(env.state.memory.curated)


def test_context_hashes_name_content_and_counter() -> None:
    one, other = (play(make_env(), search(word))[0].context for word in ("Ada", "Byron"))
    same = play(make_env(), search("Ada"))[0].context
    assert one is not None
    assert other is not None
    assert same is not None
    assert one.hash == same.hash != other.hash
