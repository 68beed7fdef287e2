"""Entities are names as a reader sees them, without the capitals that grammar makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Compression, Env, Rendering
from harness1.env.environment import Step
from harness1.episodes.rollout import replay_episode, rollout
from harness1.memory.entities import Bridge, EntityHandles, EvidenceGraph, extract, in_handles, mentions
from harness1.policy.oracle_teacher import OracleTeacher
from harness1.policy.registry import open_policy
from harness1.records import DocId, Gold, Note, Task, UnitId
from tests.support import CORPUS, call, chunk, make_env, play, run, search, text_of


def found(text: str) -> tuple[str, ...]:
    return extract(text, 8000)


@pytest.mark.parametrize(
    ("text", "entities"),
    [
        ("met IBM, NASA and U.S. Army staff", ("IBM", "NASA", "U.S. Army")),
        ("by McDonald, iPhone, eBay, mRNA and DeepMind", ("McDonald", "iPhone", "eBay", "mRNA", "DeepMind")),
        ("with Jean-Paul Sartre and Coca-Cola", ("Jean-Paul Sartre", "Coca-Cola")),
        ("saw O'Brien’s car and Apple's shop", ("O'Brien", "Apple")),
        ("of Élodie Šimek from Žilina", ("Élodie Šimek", "Žilina")),
        ("by Ludwig van Beethoven, Osama bin Laden", ("Ludwig van Beethoven", "Osama bin Laden")),
        ("read Lord of the Rings at University of California", ("Lord of the Rings", "University of California")),
        ("J. R. R. Tolkien met George W. Bush", ("J. R. R. Tolkien", "George W. Bush")),
        ("saw Apollo 11 after World War II", ("Apollo 11", "World War II")),
        ("in 1969, the 1990s and 12/03/2020", ("1969", "1990s", "12/03/2020")),
        ("at AT&T, Tom & Jerry and 3M", ("AT&T", "Tom & Jerry", "3M")),
        ("that Bashar al-Assad and Jeanne d'Arc", ("Bashar al-Assad", "Jeanne d'Arc")),
        ("lives in St. Louis with Mr. Smith", ("St. Louis", "Smith")),
    ],
)
def test_names_of_every_shape_are_whole(text: str, entities: tuple[str, ...]) -> None:
    assert found(text) == entities


@pytest.mark.parametrize(
    ("text", "entities"),
    [
        # A common word that starts a sentence needs support from inside one.
        ("Scientists left. Company men came.", ()),
        ("Company men came to the Company.", ("Company",)),
        ("to the Company. Company men came.", ("Company",)),
        ("Casablanca is old.", ("Casablanca",)),
        ("However Apple grew. The United States did. In The Hague too.", ("Apple", "United States", "Hague")),
        ("It is so. Don't go. I'm here. They're late. It's fine.", ()),
        ("On Monday, March 12, he left. In May 2020 too.", ("2020",)),
        ("Section 3 and Table 4 in Part II.", ()),
        ("made in the U.S. The firm grew; vitamin C. However, no.", ("U.S.",)),
        ("priced 3.1415 or 1,2345 or 12345", ()),
        ("US staff left. WHO met. Who knows? Us.", ("US", "WHO")),
    ],
)
def test_what_grammar_capitalises_is_no_name(text: str, entities: tuple[str, ...]) -> None:
    assert found(text) == entities


def test_entities_are_unique_in_order_of_appearance_and_the_limit_counts() -> None:
    assert found("to Rome, Paris, Rome") == found("to Rome\nParis") == ("Rome", "Paris")
    assert extract("to Rome, Paris", 8) == ("Rome",)


@given(st.text(st.characters(), max_size=300) | st.text("AaB. '-&1/of\ud800\x00É", max_size=500))
def test_every_entity_stands_in_the_text(text: str) -> None:
    entities = found(text)
    assert len(set(entities)) == len(entities)
    assert all(len(entity) >= 2 and entity in text for entity in entities)


def test_hostile_text_takes_linear_time_and_raises_nothing() -> None:
    for text in ("A" * 10**6, "A. " * 10**5, "Aa of the " * 10**5, "A-" * 10**5, "\ud800\x00" * 10**5, ""):
        assert all(len(entity) <= 100 for entity in extract(text, 10**6))
    assert extract("an iPhone and an i" + "P" * 5_000, 8_000) == ("iPhone",)


_ADDITIONS = st.lists(st.tuples(st.sampled_from("pqrst"), st.lists(st.sampled_from("ABCDEF"), max_size=4)), max_size=12)


def graph(*additions: tuple[str, list[str]]) -> EvidenceGraph:
    result = EvidenceGraph()
    for unit, entities in additions:
        result.add(UnitId(unit), entities)
    return result


@given(_ADDITIONS, st.integers(0, 4))
def test_the_increments_equal_a_full_recount(additions: list[tuple[str, list[str]]], limit: int) -> None:
    built = graph(*additions)
    units: dict[str, dict[str, None]] = {}
    order: dict[str, set[str]] = {}
    for unit, entities in additions:
        order.setdefault(unit, set()).update(entities)
        for entity in entities:
            units.setdefault(entity, {})[unit] = None
    ranked = sorted((name for name in units if len(units[name]) > 1), key=lambda name: (-len(units[name]), name))
    expected = [Bridge(name, tuple(map(UnitId, units[name])), len(units[name])) for name in ranked]
    assert (built.bridges(100), built.bridges(limit)) == (expected, expected[:limit])
    assert built.singletons == sum(len(members) == 1 for members in units.values())
    for unit, names in order.items():
        assert set(built.entities_of(UnitId(unit))) == names


def test_case_possessives_and_dots_are_one_entity_shown_as_first_seen() -> None:
    built = graph(("p", ["U.S.", "Williams", "", "'s", "."]), ("q", ["US", "williams’"]), ("r", ["WILLIAMS's"]))
    assert [(bridge.entity, bridge.total) for bridge in built.bridges(9)] == [("Williams", 3), ("U.S.", 2)]
    assert built.bridges(1, documents=2) == [Bridge("Williams", (UnitId("p"), UnitId("q")), 3)]
    assert built.units_of("us") == ("p", "q")
    assert built.entities_of(UnitId("q")) == ("U.S.", "Williams")
    assert (built.entities_of(UnitId("x")), built.units_of("x"), built.singletons) == ((), (), 0)


ON = Env().switch(entity_handles=True)
QUESTION = "Where did the father of Ada Lovelace die?"
TASK = Task("t", QUESTION)


def test_the_question_and_the_hits_show_handles_in_the_order_of_first_appearance() -> None:
    env = make_env(ON)
    assert "Question: Where did the father of Ada Lovelace (E1) die?\n" in text_of(run(env.reset(TASK)))
    (step,) = play(env, search("Ada Lovelace daughter"))
    for shown in (
        "[D1] Ada Lovelace (E1)\n Ada Lovelace wrote the first program. She was the daughter of Lord Byron (E2).",
        "[D2] Charles Babbage (E3)\n",
    ):
        assert shown in text_of(step.context)
    view, before = step.context.view, env.state.memory.hash()
    names = ["Ada Lovelace", "Lord Byron", "Charles Babbage", "Analytical Engine"]
    assert view.entities == {f"E{number}": name for number, name in enumerate(names, 1)}
    assert (view.query, view.hits[1][0].entities) == (QUESTION, {"E1": "Ada Lovelace", "E2": "Lord Byron"})
    assert view.documents["D1"].text == CORPUS[0].text
    env.state.memory.entities.add(["Rome"])
    assert env.state.memory.hash() != before


def test_what_is_not_shown_has_no_handle() -> None:
    long = chunk("a", "River town. The river is long. It goes to Vienna.", "River")
    env = make_env(Env(compression=Compression(sentences=1)).switch(entity_handles=True, rank=False), [long])
    play(env, search("river town"), query="What?")
    assert env.state.memory.entities.names == ["River"]


def test_forms_of_a_name_share_a_handle_numbers_have_none_and_no_name_is_marked_within_a_longer_one() -> None:
    assert mentions("In 1824 Byron left in the 1820s for Rome.", 100) == [(13, "Byron"), (40, "Rome")]
    forms = EntityHandles()
    forms.add(["US Navy", "Byron", "U.S. Navy", "Byron's"])
    assert forms.names == ["US Navy", "Byron"]
    assert forms.mark("The U.S. Navy met Byron.", 100)[0] == "The U.S. Navy (E1) met Byron (E2)."
    handles = EntityHandles()
    handles.add(["Paris", "Paris Opera"])
    assert handles.mark("The Paris Opera is in Paris.", 100) == (
        "The Paris Opera (E2) is in Paris (E1).",
        {"E2": "Paris Opera", "E1": "Paris"},
    )


def test_queries_are_searched_for_in_names_and_say_so() -> None:
    fan_out = call("fan_out_search", queries=["E2", "E9", "E2 E1", "Lord Byron"])
    _, step, fanned = play(make_env(ON), search("Ada Lovelace daughter"), search("E2 poet"), fan_out)
    assert [ranking.query for ranking in step.observation.rankings] == ["Lord Byron poet"]
    assert step.observation.resolved == {"E2": "Lord Byron"}
    assert [hit.doc_id for hit in step.observation.hits] == ["byron"]
    assert "Turn 2: search_corpus: Lord Byron poet\n" in text_of(step.context)
    assert [ranking.query for ranking in fanned.observation.rankings] == ["Lord Byron", "Lord Byron Ada Lovelace"]
    assert fanned.observation.resolved == {"E2": "Lord Byron", "E1": "Ada Lovelace"}
    assert fanned.observation.notes[0] == Note("unknown_entities", {"handles": ["E9"], "count": 1})


def test_a_word_that_is_no_handle_stays_and_is_told_and_a_query_of_nothing_else_is_refused() -> None:
    (step,) = play(make_env(ON), search("E7 Byron e1 XE1"))
    assert step.observation.rankings[0].query == "E7 Byron e1 XE1"
    assert "Unknown: E7 (1). Use entity handles that are shown.\n" in text_of(step.context)
    for query in ("E7", "E7, E8"):
        assert play(make_env(ON), search(query))[0].observation.error.code == "unknown_entities"
    for query in (" E0 ", "E999999999"):  # no handle in any episode
        assert play(make_env(ON), search(query))[0].observation.error is None


def test_without_the_setting_nothing_is_marked_or_resolved() -> None:
    env = make_env()
    first, second = play(env, search("Ada Lovelace daughter"), search("E1 poet"))
    assert "(E1)" not in text_of(first.context) + text_of(second.context)
    assert (second.observation.rankings[0].query, second.observation.resolved) == ("E1 poet", {})
    assert env.state.memory.entities == EntityHandles()


@pytest.mark.parametrize("instructions", ["full", "brief"])
def test_the_static_prompt_speaks_of_handles_where_there_are_some(instructions: str) -> None:
    for on in (True, False):
        env = make_env(Env(rendering=Rendering(instructions=instructions)).switch(entity_handles=on))
        assert ("a query may say E3" in env.renderer.static.text) == ("E3" in env.renderer.static.text) == on


def test_the_teacher_writes_queries_with_handles_and_its_first_names_the_question_whoever_began() -> None:
    gold = Gold({DocId("ada"): 1, DocId("byron"): 1})
    episode = run(rollout(make_env(ON), OracleTeacher({"t": gold}), TASK))
    calls = [turn.action.arguments for turn in episode.turns if turn.action]
    queries = [query for each in calls for query in (each.get("query", ""), *each.get("queries", ()))]
    assert queries[0] == "E1 father"
    assert not any("Ada" in query or "Byron" in query for query in queries)
    assert {entry.unit_id for entry in episode.curated} >= {"ada", "byron"}
    context = play(make_env(ON), search("Lord Byron"))[0].context
    assert run(OracleTeacher({"t": gold}).open(TASK, 0).act(context)).actions == (search("E1 father"),)


@given(st.text("EeD0123 ,ab", max_size=30), st.integers(0, 4))
def test_any_query_is_an_observation(query: str, entities: int) -> None:
    handles = EntityHandles()
    handles.add([f"Name{letter}" for letter in "abcd"[:entities]])
    spelled = handles.spell(query)
    assert all(int(handle[1:]) <= entities for handle in spelled.resolved)
    assert all(int(handle[1:]) > entities for handle in spelled.unknown)
    assert in_handles(spelled.text, spelled.resolved) == query or "Name" in query
    named = {"E1": "Paris", "E2": "Paris Opera", "E3": "Ann"}
    assert in_handles("Paris Opera, Paris and Anna", named) == "E2, E1 and Anna", "the longest first"


ON_LEAD_HANDLES = Env().switch(lead_handles=True)
BRIEF = Env(rendering=Rendering(order="epoch", instructions="minimal")).switch(lead_handles=True)


def asked(step: Step) -> list[str]:
    return [ranking.query for ranking in step.turn.observation.rankings]


def test_the_question_is_asked_by_its_handle() -> None:
    env = make_env(ON_LEAD_HANDLES)
    context = run(env.reset(TASK))
    assert f"Question (Q): {QUESTION}\n" in text_of(context)
    assert context.view.handle == "Q"
    (step,) = play(env, search("Q"))
    assert (asked(step), step.turn.observation.resolved) == ([QUESTION], {"Q": QUESTION})
    assert asked(play(env, search("the magazine Q"))[0]) == ["the magazine Q"]
    assert asked(play(make_env(), search("Q"))[0]) == ["Q"]
    assert "[D1] Ada Lovelace\n Ada Lovelace wrote" in text_of(play(env, search("Ada Lovelace daughter"))[0].context)


def test_a_lead_is_searched_by_its_handle_and_with_the_question() -> None:
    steps = play(make_env(ON_LEAD_HANDLES), search("Q"), search("E2"), search("Q E2"), query=QUESTION)
    leads = {lead.entity: lead.name for lead in steps[0].context.view.leads}
    assert [asked(step) for step in steps[1:]] == [[leads["E2"]], [f"{QUESTION} {leads['E2']}"]]
    handles = EntityHandles()
    handles.add(["Q Awards"])  # a name that holds the letter is not replaced
    for query, text in (("Q", "who?"), ("Q, E1", "who?, Q Awards"), ("E1", "Q Awards")):
        assert handles.spell(query, "who?").text == text


def test_minimal_instructions_show_leads_as_handle_name_and_sources() -> None:
    (step,) = play(make_env(BRIEF), search("Q"), query=QUESTION)
    first = step.context.view.leads[0]
    assert first.entity
    named = f" ({', '.join(first.handles)})" if first.handles else ""
    assert f"Search next: {first.entity} {first.name}{named}" in text_of(step.context)


@pytest.mark.parametrize("env", [ON_LEAD_HANDLES, BRIEF])
def test_an_episode_that_uses_them_replays(env: Env) -> None:
    gold = Gold({DocId("miss"): 1})
    episode = run(rollout(make_env(env), open_policy("lead-teacher", {"t": gold}), TASK))
    assert "Q" in [turn.action.arguments.get("query") for turn in episode.turns if turn.action]
    assert replay_episode(episode, env).difference is None
