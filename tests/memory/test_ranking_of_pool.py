"""The evidence value: what speaks for a document, and which names to search next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from harness1.config import AutoPopulate, Config, Dense, Env, Index, Read, Rendering, Retrieval
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import ReplayReport, replay_episode, rollout
from harness1.memory.ranking import FEATURES, FITTED, EvidenceValue, weights_for
from harness1.memory.working_memory import WorkingMemory, bridge_documents, question_names, rare_bridges
from harness1.policy.registry import open_policy
from harness1.records import ChunkId, Hit, Ranking, Task, Unit, UnitId
from harness1.retrieval.build import build_index
from harness1.retrieval.retriever import open_embedded
from tests.support import WORDS, Script, call, curate, hit, make_env, run, search

RANKED = Env().switch(rank=True, leads=True)
QUESTION = "Where did the father of Ada Lovelace die?"


def memory_of(*hits: Hit, query: str = QUESTION, config: Env = RANKED) -> WorkingMemory:
    """A memory after one search that returned these hits in order."""
    memory = WorkingMemory.empty(query, "document")
    memory.turn = 1
    searched_for(memory, query, *hits, config=config)
    return memory


def searched_for(memory: WorkingMemory, query: str, *hits: Hit, config: Env = RANKED) -> None:
    memory.absorb(hits, config)
    memory.take_rankings([Ranking(query, tuple(each.chunk_id for each in hits))], hits, config)


def order(memory: WorkingMemory) -> list[UnitId]:
    return list(memory.assess().units)


def told(memory: WorkingMemory) -> tuple[object, ...]:
    """All that an assessment says."""
    found = memory.assess()
    return found.units, found.features.tolist(), found.leads


def of(memory: WorkingMemory, unit: str) -> dict[str, float]:
    """The features of one unit by name."""
    table = memory.value.features(memory.query)[0]
    return dict(zip(FEATURES, table[list(memory.value.numbers).index(UnitId(unit))].tolist(), strict=True))


def test_a_title_in_the_question_lifts_a_document_and_less_so_inside_a_longer_name() -> None:
    hits = [hit("x", "Somebody died.", "Rain", rank=0), hit("ada", "She wrote programs.", "Ada Lovelace", rank=1)]
    found = memory_of(*hits)
    assert (of(found, "ada")["named"], order(found)[0]) == (1.0, "ada")
    found = memory_of(hit("ada", "A name.", "Ada"), hit("whole", "A person.", "Ada Lovelace", rank=1))
    assert of(found, "ada")["named"] == 0.25


def test_a_document_that_a_strong_one_names_is_linked_and_more_so_near_a_word_of_the_relation() -> None:
    text = "Her father was Lord Byron. For years and in many cities of the kingdom she often met Charles Babbage."
    others = [hit("byron", "A poet.", "Lord Byron", rank=1), hit("babbage", "An engineer.", "Charles Babbage", rank=2)]
    found = memory_of(hit("ada", text, "Ada Lovelace"), *others)
    assert of(found, "byron")["link"] > of(found, "babbage")["link"] > 0
    assert of(found, "ada")["link"] == 0
    assert found.assess().reasons[UnitId("byron")] == "named by strong documents"


def test_a_link_reaches_over_two_hops() -> None:
    ada = hit("ada", "Her father was Lord Byron.", "Ada Lovelace")
    noise = (hit(f"noise{at}", f"Nothing of note {at}.", f"Noise {at}", rank=1 + at) for at in range(12))
    byron = hit("byron", "He died in Missolonghi.", "Lord Byron", rank=13)
    assert of(memory_of(ada, *noise, byron, hit("miss", "A town.", "Missolonghi", rank=14)), "miss")["link"] > 0


def test_rare_terms_weigh_more_and_one_sentence_that_answers_counts_beside_the_whole_text() -> None:
    common = [hit(f"c{at}", "The father came home.", f"Home {at}", rank=at) for at in range(6)]
    found = memory_of(*common, hit("rare", "To die is nothing.", "Nothing", rank=6))
    assert of(found, "rare")["cover"] > of(found, "c0")["cover"]
    together = hit("together", "The father of Ada Lovelace was to die. He rested.", "One")
    apart = hit("apart", "The father rested. Ada sang. Lovelace rose. They die.", "Two", rank=1)
    found = memory_of(together, apart)
    assert of(found, "together")["cover"] == pytest.approx(of(found, "apart")["cover"])
    assert of(found, "together")["sentence"] > of(found, "apart")["sentence"]


@pytest.mark.parametrize(
    ("scores", "margins"), [((9, 7, 5), (1.0, 0.5, 0.0)), ((3, 0, -2), None), ((-1, -2, -3), None)]
)
def test_scores_for_the_question_count_from_the_lowest_to_the_highest_and_0_or_below_is_found_too(
    scores: tuple[float, ...], margins: tuple[float, ...] | None
) -> None:
    hits = [structs.replace(hit(f"u{at}", f"{at}.", ""), score=score) for at, score in enumerate(scores)]
    memory = memory_of(*hits)
    found = [of(memory, f"u{at}") for at in range(3)]
    assert all(each["fused"] > 0 for each in found)
    assert all(0 <= each["margin"] <= 1 for each in found)
    assert margins is None or [each["margin"] for each in found] == pytest.approx(margins)


def test_later_pages_of_a_query_continue_its_ranks() -> None:
    memory = memory_of(hit("a", "One.", "A"), hit("b", "Two.", "B", rank=1))
    searched_for(memory, QUESTION, hit("c", "Three.", "C"))
    assert of(memory, "c")["fused"] == pytest.approx(60 / 62)


def test_a_query_about_something_else_counts_for_documents_that_begin_with_its_words_and_share_that() -> None:
    memory = memory_of(hit("a", "One.", "A"))
    begins = hit("begins", "(Missolonghi) is a town.", "", rank=1)
    searched_for(memory, "Missolonghi", hit("inside", "Not far from Missolonghi.", "Greece"), begins)
    assert of(memory, "begins")["margin"] == 0.0
    assert (of(memory, "begins")["via"], of(memory, "inside")["via"]) == (0.5, 0.0)
    searched_for(memory, "Acme", *(hit(f"p{at}", f"Words {at}.", f"Acme 2018 page {at}", rank=at) for at in range(4)))
    assert of(memory, "p0")["via"] == 0.25


def test_ranks_of_other_queries_count_for_what_they_are_about_or_strong_documents_name_or_else_for_all() -> None:
    memory = memory_of(hit("ada", "Her father was Lord Byron.", "Ada Lovelace"))
    about, named = hit("about", "Missolonghi is a town.", "", rank=1), hit("byron", "A poet.", "Lord Byron", rank=2)
    searched_for(memory, "Missolonghi", hit("inside", "Not far from Missolonghi.", "Greece"), about, named)
    assert of(memory, "inside")["fused"] == 0.0
    assert min(of(memory, unit)["fused"] for unit in ("ada", "about", "byron")) > 0.4
    memory = WorkingMemory.empty(QUESTION, "document")  # the whole question was never searched
    searched_for(memory, "father of Ada", *(hit(f"u{at}", "Rain.", f"Rain {at}", rank=at) for at in range(3)))
    assert of(memory, "u0")["fused"] > of(memory, "u1")["fused"] > of(memory, "u2")["fused"] > 0


def test_a_text_without_a_title_is_about_its_first_name_and_less_surely_the_more_texts_begin_alike() -> None:
    first = hit("ada", "Her father was Lord Byron.", "Ada Lovelace")
    byron, other = hit("byron", "Lord Byron was a poet.", "", rank=1), hit("other", "He met Lord Byron.", "", rank=2)
    found = memory_of(first, byron, other)
    assert of(found, "byron")["link"] > of(found, "other")["link"] == 0
    assert not [lead for lead in found.assess().leads if lead.name == "Lord Byron"]
    for count in (1, 4):
        alike = [hit(f"ada{at}", f"Ada Lovelace wrote {at} programs.", "", rank=at) for at in range(count)]
        assert of(memory_of(*alike), "ada0")["named"] == 1 / count


def test_what_other_queries_find_does_not_reorder_what_the_question_found_by_its_terms() -> None:
    hits = [hit("die", "To die is nothing.", "One"), hit("father", "The father came.", "Two", rank=1)]
    memory = memory_of(*hits, hit("both", "The father came home.", "Three", rank=2))
    before = {name: of(memory, name)["sentence"] for name in ("die", "father")}
    searched_for(memory, "graves", *(hit(f"g{at}", "They die.", f"Grave {at}", rank=at) for at in range(9)))
    assert {name: of(memory, name)["sentence"] for name in ("die", "father")} == before


def test_other_parts_of_the_same_source_speak_for_a_document() -> None:
    pages = [hit(f"p{at}", f"Nothing {at}.", f"Report 2018 page {at}", rank=at) for at in range(3)]
    nameless = [hit(f"n{at}", f"Nameless {at}.", "", rank=4 + at) for at in range(2)]
    found = memory_of(*pages, hit("other", "Nothing more.", "Letter", rank=3), *nameless)
    assert of(found, "p2")["siblings"] == pytest.approx((1 + 1 / (1 + 1 / 5)) / 3)
    assert of(found, "other")["siblings"] == of(found, "n0")["siblings"] == 0.0


def test_a_document_that_reads_like_the_best_is_lifted_and_less_so_if_it_is_short() -> None:
    best = hit("best", "Ada Lovelace: the engine weaves algebraic patterns of numbers and cards.", "Ada Lovelace")
    noise = (hit(f"x{at}", f"Unrelated matter {WORDS[at]}.", f"X{at}", rank=1 + at) for at in range(6))
    like = hit("like", "An engine that weaves algebraic patterns of numbers with punched cards.", "Loom", rank=40)
    found = memory_of(best, *noise, like, hit("short", "Algebraic patterns.", "Loom two", rank=41))
    assert of(found, "like")["alike"] > of(found, "short")["alike"] > of(found, "x5")["alike"]


def test_the_parts_of_a_long_question_are_leads_until_they_are_searched() -> None:
    told = ["Which firm opened a harbour museum in Lisbon", "designed the glass tower beside the old station"]
    memory = WorkingMemory.empty(f"{told[0]}, and who {told[1]}?", "document")
    assert [lead.name for lead in memory.assess().leads if lead.is_part] == told
    memory.take_rankings([Ranking(told[0], (ChunkId("a#0"),))], [], RANKED)
    searched_for(memory, told[0], hit("a", "One.", "A"))
    assert [lead.name for lead in memory.assess().leads if lead.is_part] == told[1:]


def test_leads_are_names_of_the_question_first_then_names_in_strong_documents() -> None:
    memory = memory_of(hit("ada", "Her father was Lord Byron.", "Ada Lovelace"))
    (lead,) = memory.assess().leads
    assert (lead.name, lead.sources) == ("Lord Byron", ("ada",))
    assert [each.name for each in WorkingMemory.empty(QUESTION, "document").assess().leads] == ["Ada Lovelace"]
    searched_for(memory, "Lord Byron", hit("other", "Nothing.", "Other"))
    assert not memory.assess().leads, "it was searched for"


def test_no_weight_is_negative_and_every_feature_has_one() -> None:
    for weights in map(structs.astuple, (FITTED.terms, FITTED.embeddings)):
        assert min(weights) >= 0
        assert sum(weight > 0 for weight in weights) >= len(FEATURES) - 2


hits_of = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.sampled_from(WORDS), min_size=1, max_size=12), st.sampled_from(WORDS)),
    min_size=1,
    max_size=12,
)


def searched(memory: WorkingMemory, drawn: list[tuple[int, list[str], str]], query: str) -> None:
    texts = [(f"d{number}", f"{' '.join(words).capitalize()}.", title) for number, words, title in drawn]
    searched_for(memory, query, *(hit(*text, index=at) for at, text in enumerate(texts)))


@given(hits_of, hits_of)
def test_the_order_is_a_function_of_the_memory_alone(first: Any, second: Any) -> None:
    memory = WorkingMemory.empty(QUESTION, "document")
    searched(memory, first, QUESTION)
    fork = memory.fork()
    before = told(memory)
    searched(fork, second, "Byron poet")
    assert told(memory) == before  # what a fork does is not seen
    table = memory.value.features(memory.query)[0]
    copied = msgspec.json.decode(msgspec.json.encode(memory.value), type=EvidenceValue)
    assert copied.features(memory.query)[0].tolist() == table.tolist()
    again = WorkingMemory.empty(QUESTION, "document")
    searched(again, first, QUESTION)
    searched(again, second, "Byron poet")
    assert (told(again), set(fork.assess().units)) == (told(fork), set(fork.pool.entries))


@given(st.lists(hits_of, min_size=1, max_size=4))
def test_a_kept_assessment_is_that_of_a_fresh_copy_after_every_search(searches: Any) -> None:
    memory = WorkingMemory.empty(QUESTION, "document")
    for at, drawn in enumerate(searches):
        searched(memory, drawn, QUESTION if at % 2 else f"Byron {at}")
        assert told(memory) == told(memory.fork())
        assert memory.assess() is memory.assess()


@given(st.permutations(["p", "q", "r", "s"]))
def test_equal_documents_are_ranked_in_order_of_arrival(names: list[str]) -> None:
    memory = WorkingMemory.empty("Nothing fits?", "document")
    memory.absorb([hit(name, f"Text {name}.", "") for name in names], RANKED)
    assert order(memory) == names


ACTIONS = (
    *(search(query) for query in ("Ada Lovelace", "Lord Byron poet", "town rain", "E1", "E3 E2")),
    *(call("read_document", doc_id="D1"), curate(add_ids=["D2"]), call("verify", doc_ids=["D1"])),
    call("fan_out_search", queries=["Byron", "Charles Babbage"]),
)
actions_of = st.lists(st.sampled_from(ACTIONS), max_size=5)
WHOLE = msgspec.structs.replace(
    RANKED, auto_populate=AutoPopulate(documents=2, by="evidence"), read=Read(by="evidence")
).switch(rank=True, entity_handles=True)
HANDLES_IN_QUERIES = [
    *(search("E1 program"), call("fan_out_search", queries=["E2", "E3 E99"]), search("E99")),
    *(curate(add_ids=["D1"]), call("read_document", doc_id="D2")),
]


@settings(max_examples=40)
@example("paper", HANDLES_IN_QUERIES)
@given(st.sampled_from(["paper", "stable_first", "epoch", "transcript"]), actions_of)
def test_a_replayed_episode_has_the_same_order_and_leads(rendering: Any, actions: list[Any]) -> None:
    task, config = Task("t", QUESTION), msgspec.structs.replace(WHOLE, rendering=Rendering(rendering))
    episode = run(rollout(make_env(config), Script(*actions), task))
    assert replay_episode(episode, config) == ReplayReport(len(episode.turns), len(episode.turns))
    live, again = make_env(config), make_env(config)
    run(live.reset(task))
    again.begin(WorkingMemory.empty(QUESTION, "document"))
    for turn in episode.turns:
        assert turn.action is not None
        run(live.step([turn.action], turn.reasoning))
        again.replay(turn)
        assert told(live.state.memory) == told(again.state.memory)
        assert live.state.memory.entities == again.state.memory.entities


def test_values_are_finite_for_questions_of_any_length_and_documents_of_any_kind() -> None:
    hits = [hit("e", "", ""), hit("n", "\n\n\n", "\n", rank=1), hit("l", "word " * 9000, "w" * 5000, rank=2)]
    for query in ("", "?", "the of and", "word " * 500, "日本 " * 100, "Ada " * 70 + "x1 " * 70):
        table = memory_of(*hits, query=query).value.features(query)[0]
        assert np.isfinite(table).all()
        assert (table >= 0).all()


def test_the_best_are_curated_anew_after_each_search_until_the_policy_curates() -> None:
    held: list[list[UnitId]] = []
    env = make_env(msgspec.structs.replace(RANKED, auto_populate=AutoPopulate(documents=2, by="evidence")))
    run(env.reset(Task("t", QUESTION)))
    for action in (search("town rain"), search("Ada Lovelace"), curate(add_ids=["D1"]), search("Lord Byron poet")):
        run(env.step([action]))
        held.append(list(env.state.memory.curated.tags))
    first, second, third, fourth = held
    assert len(first) == len(second) == 2
    assert first != second
    assert second[0] == "ada"
    assert third == fourth == list(dict.fromkeys([*second, "noise"]))


def test_evidence_is_seen_in_text_without_spaces() -> None:
    rain, tower = ("今日は雨が降る。明日は晴れる。", "天気"), ("設計者は内藤多仲である。", "東京タワー")
    found = memory_of(hit("rain", *rain), hit("tower", *tower, rank=1), query="東京タワーの設計者は誰ですか")
    assert of(found, "tower")["named"] == 1.0
    assert of(found, "tower")["cover"] > of(found, "rain")["cover"]
    assert order(found)[0] == "tower"


def like(unit: str, likeness: float | None, rank: int = 0) -> Hit:
    return structs.replace(hit(unit, f"A poet wrote {unit}.", unit, rank=rank), likeness=likeness)


def test_units_are_placed_by_likeness_and_the_likest_comes_before_what_else_is_equal() -> None:
    hits = like("one", 0.3), like("two", 0.8), like("three", 0.8), like("four", None)
    memory = memory_of(*hits, query="Which poet?", config=Env())
    assert [of(memory, each.doc_id)["semantic"] for each in hits] == pytest.approx([1 / 1.4, 1.0, 1.0, 0.0])
    assert order(memory_of(like("one", 0.1), like("two", 0.9), query="Which poet?")) == ["two", "one"]
    alone = memory_of(structs.replace(hit("rain", "It rained.", "Rain"), likeness=0.9), query="Which poet?")
    assert alone.assess().reasons[UnitId("rain")] == "close in meaning"


def test_the_weights_for_embeddings_count_only_where_a_likeness_is_known() -> None:
    for likeness, weights in ((0.5, FITTED.embeddings), (None, FITTED.terms)):
        memory = memory_of(like("one", likeness))
        assert weights_for(memory.value.features(memory.query)[0]).tolist() == list(structs.astuple(weights))


@pytest.mark.parametrize("ranks", [True, False])
def test_likeness_is_recorded_where_units_are_ranked_and_replays_without_a_model(tmp_path: Path, ranks: bool) -> None:
    source = open_source("world:60")
    build_index(list(source.documents()), tmp_path, Index(dense=Dense(model="hash:64")))
    env = Env(retrieval=Retrieval(mode="hybrid")).switch(rank=ranks)
    task = Task("t", source.tasks("test")[0].query)
    episode = run(rollout(SearchEnv(env, open_embedded(tmp_path, Config(env=env))), open_policy("scripted"), task))
    likenesses = [each.likeness for observation in episode.observations for each in observation.hits]
    assert {likeness is not None for likeness in likenesses} == {ranks}
    assert replay_episode(episode, env).difference is None


RANKED_BRIDGES = Env().switch(rank=True, dedup=False)
QUESTION_BRIDGES = "Did Ed Wood ever meet Scott Derrickson?"


def memory_of_bridges(*hits: Hit, query: str = QUESTION_BRIDGES, unit: Unit = "document") -> WorkingMemory:
    memory = WorkingMemory.empty(query, unit)
    memory.absorb(hits, RANKED_BRIDGES)
    return memory


def linked(memory: WorkingMemory, limit: int = 9) -> dict[UnitId, tuple[str, ...]]:
    return dict(bridge_documents(memory, list(memory.pool.entries), limit))


def shared(memory: WorkingMemory, limit: int = 9) -> list[str]:
    return [bridge.entity for bridge in rare_bridges(memory, list(memory.pool.entries), limit, 5)]


def test_a_document_that_covers_two_names_links_them_in_the_question_s_order() -> None:
    memory = memory_of_bridges(
        hit("both", "Here Scott Derrickson speaks of Ed Wood.", "Talk"),
        hit("one", "Here is Ed Wood.", "Alone"),
        hit("titled", "He admires Ed Wood.", "Scott Derrickson (director)"),
    )
    assert linked(memory) == dict.fromkeys(("both", "titled"), ("Ed Wood", "Scott Derrickson"))
    named = hit("wood", "A director.", "Ed Wood")
    assert linked(memory_of_bridges(named, hit("scott", "He met Ed Wood.", "Scott Derrickson"))).keys() == {"scott"}


def test_a_document_links_the_name_that_it_covers_with_the_one_whose_document_names_it() -> None:
    film = hit("film", "A film that Scott Derrickson shot.", "Sinister Night")
    about = hit("wood", "He liked Sinister Night and Plan Nine.", "Ed Wood")
    other = hit("plan", "A film about graves.", "Plan Nine")
    assert linked(memory_of_bridges(film, about, other)) == {"film": ("Ed Wood", "Scott Derrickson")}


def test_those_that_link_most_names_come_first_and_ties_keep_the_evidence_order() -> None:
    texts = {"p": "Ed Wood and Tim Burton", "q": "Ed Wood and Scott Derrickson"}
    texts["all"] = "Ed Wood, Scott Derrickson and Tim Burton"
    hits = (hit(unit, f"With {text}.", unit.upper()) for unit, text in texts.items())
    memory = memory_of_bridges(*hits, query="Did Ed Wood, Scott Derrickson or Tim Burton win?")
    assert list(linked(memory)) == ["all", "p", "q"]
    backwards = [UnitId(unit) for unit in ("q", "p", "all")]
    assert list(dict(bridge_documents(memory, backwards, 2))) == ["all", "q"]
    assert question_names("Did Ed Wood meet ED WOOD in 1954 in Rome?") == ("Ed Wood", "Rome")


def test_a_name_of_few_good_documents_comes_before_one_of_many_and_units_are_listed_up_to_a_limit() -> None:
    many = [hit(f"n{at}", f"In France. Number {at}.", f"N{at}") for at in range(8)]
    memory = memory_of_bridges(hit("p", "Lugosi in France.", "P"), *many, hit("q", "With Lugosi.", "Q"))
    assert (shared(memory), shared(memory, 1)) == (["Lugosi", "France"], ["Lugosi"])
    _, bridge = rare_bridges(memory, list(memory.pool.entries), 9, 2)
    assert (bridge.unit_ids, bridge.total) == (("p", "n0"), 9)


def test_the_better_the_documents_the_earlier_the_name_and_ties_keep_their_order() -> None:
    texts = ("Lugosi.", "Vampira and Karloff.", "Vampira and Karloff.", "Lugosi.")
    memory = memory_of_bridges(*(hit(f"d{at}", f"Of {text}", f"Part {at}") for at, text in enumerate(texts)))
    assert shared(memory) == ["Lugosi", "Vampira", "Karloff"]
    order = [UnitId(unit) for unit in ("d1", "d2", "d0", "d3")]
    assert [bridge.entity for bridge in rare_bridges(memory, order, 9, 5)] == ["Vampira", "Karloff", "Lugosi"]


def test_names_of_the_question_titles_of_the_pool_and_years_lead_nowhere() -> None:
    for name in ("Lugosi", "Wood", "Ed Wood", "1954", "Old Graves"):
        hits = hit("p", f"It was {name} then.", "P"), hit("q", f"Here {name} is.", "Q")
        memory = memory_of_bridges(*hits, hit("graves", "It is quiet.", "Old Graves"))
        assert shared(memory) == [name] * (name == "Lugosi")


def test_a_name_in_parts_of_one_document_only_leads_nowhere() -> None:
    parts = [hit("p", f"Part {at} on Lugosi.", "P", index=at) for at in range(2)]
    assert shared(memory_of_bridges(*parts, unit="chunk")) == []
    assert shared(memory_of_bridges(*parts, hit("q", "On Lugosi.", "Q"), unit="chunk")) == ["Lugosi"]
