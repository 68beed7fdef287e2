"""Entity handles: what is shown by name can be searched for by a handle, and without the setting nothing changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Env, Evidence, Rendering
from harness1.env.environment import Step
from harness1.episodes.rollout import rollout
from harness1.memory.entities import EntityHandles, in_handles, mentions
from harness1.policy.oracle_teacher import OracleTeacher
from harness1.policy.scripted import ScriptedPolicy
from harness1.records import DocId, Gold, Note, Task
from tests.support import CORPUS, call, make_env, play, run, search, text_of

ON = Env(evidence=Evidence(handles=True))
QUESTION = "Where did the father of Ada Lovelace die?"
TASK = Task("t", QUESTION)


def texts(step: Step) -> str:
    return text_of(step.context)


def test_the_question_and_the_hits_show_handles_in_the_order_of_first_appearance() -> None:
    env = make_env(ON)
    assert "Question: Where did the father of Ada Lovelace (E1) die?\n" in text_of(run(env.reset(TASK)))
    (step,) = play(env, search("Ada Lovelace daughter"))
    assert "[D1] Ada Lovelace (E1)\nAda Lovelace wrote the first program. She was the daughter of Lord Byron (E2)." in (
        texts(step)
    )
    assert "[D2] Charles Babbage (E3)\n" in texts(step)
    assert step.context is not None
    view = step.context.view
    assert view.entities == {
        "E1": "Ada Lovelace",
        "E2": "Lord Byron",
        "E3": "Charles Babbage",
        "E4": "Analytical Engine",
    }
    assert view.query == QUESTION
    assert view.hits[1][0].entities == {"E1": "Ada Lovelace", "E2": "Lord Byron"}
    assert view.documents["D1"].text == CORPUS[0].text


def test_a_handle_never_changes() -> None:
    env = make_env(ON)
    steps = play(env, search("Ada Lovelace daughter"), search("poet"), search("town"))
    shown = [step.context.view.entities for step in steps if step.context]
    for before, after in pairwise(shown):
        assert before.items() <= after.items()
    assert len(shown[-1]) > len(shown[0])


def test_years_and_numbers_have_none() -> None:
    assert mentions("In 1824 Byron left in the 1820s for Rome.", 100) == [(13, "Byron"), (40, "Rome")]


def test_a_name_within_a_longer_one_is_not_marked() -> None:
    handles = EntityHandles()
    handles.add(["Paris", "Paris Opera"])
    assert handles.mark("The Paris Opera is in Paris.", 100) == (
        "The Paris Opera (E2) is in Paris (E1).",
        {"E2": "Paris Opera", "E1": "Paris"},
    )


def test_forms_of_a_name_share_a_handle() -> None:
    handles = EntityHandles()
    handles.add(["US Navy", "Byron", "U.S. Navy", "Byron's"])
    assert handles.names == ["US Navy", "Byron"]
    assert handles.mark("The U.S. Navy met Byron.", 100)[0] == "The U.S. Navy (E1) met Byron (E2)."


def test_a_query_is_searched_for_in_names_and_says_so() -> None:
    env = make_env(ON)
    _, step = play(env, search("Ada Lovelace daughter"), search("E2 poet"))
    assert step.observation is not None
    assert [ranking.query for ranking in step.observation.rankings] == ["Lord Byron poet"]
    assert step.observation.resolved == {"E2": "Lord Byron"}
    assert [hit.doc_id for hit in step.observation.hits] == ["byron"]
    assert "Turn 2: search_corpus: Lord Byron poet\n" in texts(step)


def test_all_queries_of_a_fan_out_may_hold_handles() -> None:
    env = make_env(ON)
    _, step = play(
        env, search("Ada Lovelace daughter"), call("fan_out_search", queries=["E2", "E9", "E2 E1", "Lord Byron"])
    )
    assert step.observation is not None
    assert [ranking.query for ranking in step.observation.rankings] == ["Lord Byron", "Lord Byron Ada Lovelace"]
    assert step.observation.resolved == {"E2": "Lord Byron", "E1": "Ada Lovelace"}
    assert step.observation.notes[0] == Note("unknown_entities", {"handles": ["E9"], "count": 1})


def test_a_word_that_is_no_handle_stays_and_is_told() -> None:
    (step,) = play(make_env(ON), search("E7 Byron e1 XE1"))
    assert step.observation is not None
    assert step.observation.rankings[0].query == "E7 Byron e1 XE1"
    assert "Unknown: E7 (1). Use entity handles that are shown.\n" in texts(step)


@pytest.mark.parametrize("query", ["E7", " E0 ", "E7, E8", "E999999999"])
def test_a_query_of_unknown_handles_alone_is_refused_or_a_word(query: str) -> None:
    (step,) = play(make_env(ON), search(query))
    assert step.observation is not None
    if step.observation.error is None:
        # What could be no handle in any episode is a word.
        assert query in (" E0 ", "E999999999")
    else:
        assert step.observation.error.code == "unknown_entities"
        assert step.observation.rankings == ()


def test_without_the_setting_nothing_is_marked_or_resolved() -> None:
    env = make_env()
    first, second = play(env, search("Ada Lovelace daughter"), search("E1 poet"))
    assert "(E1)" not in texts(first) + texts(second)
    assert second.observation is not None
    assert second.observation.rankings[0].query == "E1 poet"
    assert second.observation.resolved == {}
    assert env.state.memory.entities == EntityHandles()


@pytest.mark.parametrize("instructions", ["full", "brief"])
def test_the_static_prompt_speaks_of_handles_where_there_are_some(instructions: str) -> None:
    rendering = Rendering(instructions=instructions)  # type: ignore[arg-type]
    on, off = (make_env(Env(evidence=Evidence(handles=each), rendering=rendering)) for each in (True, False))
    assert "a query may say E3" in on.renderer.static.text
    assert "E3" not in off.renderer.static.text


def test_a_fork_names_its_own_entities() -> None:
    env = make_env(ON)
    play(env, search("Ada Lovelace daughter"))
    names = list(env.state.memory.entities.names)
    run(env.fork().step([search("town")]))
    assert env.state.memory.entities.names == names
    assert env.fork().state.memory.hash() == env.state.memory.hash()


def test_handles_are_in_the_hash_of_the_memory() -> None:
    env = make_env(ON)
    play(env, search("Ada Lovelace daughter"))
    before = env.state.memory.hash()
    env.state.memory.entities.add(["Rome"])
    assert env.state.memory.hash() != before


def test_the_teacher_writes_queries_with_handles() -> None:
    teacher = OracleTeacher({"t": Gold({DocId("ada"): 1, DocId("byron"): 1})})
    env = make_env(ON)
    episode = run(rollout(env, teacher, TASK))
    queries = [
        query
        for turn in episode.turns
        if turn.action
        for query in [turn.action.arguments.get("query", ""), *turn.action.arguments.get("queries", ())]
    ]
    assert queries[0] == "E1 father"
    assert not any("Ada" in query or "Byron" in query for query in queries)
    assert {entry.unit_id for entry in episode.curated} >= {"ada", "byron"}


def test_the_script_does_not_notice_handles() -> None:
    plain, marked = (run(rollout(make_env(env), ScriptedPolicy(), TASK)) for env in (Env(), ON))
    assert [turn.action for turn in marked.turns] == [turn.action for turn in plain.turns]


def test_names_become_handles_longest_first() -> None:
    entities = {"E1": "Paris", "E2": "Paris Opera", "E3": "Ann"}
    assert in_handles("Paris Opera, Paris and Anna", entities) == "E2, E1 and Anna"


@given(st.text("EeD0123 ,ab", max_size=30), st.integers(0, 4))
def test_any_query_is_an_observation(query: str, entities: int) -> None:
    handles = EntityHandles()
    handles.add([f"Name{letter}" for letter in "abcd"[:entities]])
    spelled = handles.spell(query)
    assert all(int(handle[1:]) <= entities for handle in spelled.resolved)
    assert all(int(handle[1:]) > entities for handle in spelled.unknown)
    assert in_handles(spelled.text, spelled.resolved) == query or "Name" in query


def test_the_teachers_first_query_names_the_question_alone_whoever_began() -> None:
    context = play(make_env(ON), search("Lord Byron"))[0].context
    assert context is not None
    teacher = OracleTeacher({"t": Gold({DocId("miss"): 1})}).open(TASK, 0)
    assert run(teacher.act(context)).actions == (search("E1 father"),)
