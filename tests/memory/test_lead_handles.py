"""Handles of the question and of leads: short queries that mean long ones, and nothing else gets a handle."""

from __future__ import annotations

import pytest

from harness1.config import Env, Leads, Rendering
from harness1.env.environment import Step
from harness1.memory.entities import EntityHandles
from harness1.records import Task
from tests.support import make_env, play, run, search, text_of

ON = Env(leads=Leads(handles=True))
BRIEF = Env(leads=Leads(handles=True), rendering=Rendering(order="epoch", instructions="minimal"))
QUESTION = "Where did the father of Ada Lovelace die?"
TASK = Task("t", QUESTION)


def asked(step: Step) -> list[str]:
    assert step.turn.observation is not None
    return [ranking.query for ranking in step.turn.observation.rankings]


def test_the_question_is_asked_by_its_handle() -> None:
    env = make_env(ON)
    context = run(env.reset(TASK))
    assert f"Question (Q): {QUESTION}\n" in text_of(context)
    assert context.view.handle == "Q"
    (step,) = play(env, search("Q"))
    assert asked(step) == [QUESTION]
    assert step.turn.observation is not None
    assert step.turn.observation.resolved == {"Q": QUESTION}


def test_a_lead_is_searched_by_its_handle_and_with_the_question() -> None:
    steps = play(make_env(ON), search("Q"), search("E2"), search("Q E2"), query=QUESTION)
    assert steps[0].context is not None
    leads = {lead.entity: lead.name for lead in steps[0].context.view.leads}
    assert set(leads) >= {"E2"}
    assert [asked(step) for step in steps[1:]] == [[leads["E2"]], [f"{QUESTION} {leads['E2']}"]]


def test_a_letter_in_a_query_of_words_stays() -> None:
    (step,) = play(make_env(ON), search("the magazine Q"))
    assert asked(step) == ["the magazine Q"]


def test_without_the_setting_q_is_a_letter() -> None:
    env = make_env(Env())
    assert "Question: " in text_of(run(env.reset(TASK)))
    (step,) = play(env, search("Q"))
    assert asked(step) == ["Q"]


@pytest.mark.parametrize(("query", "text"), [("Q", "who?"), ("Q, E1", "who?, Q Awards"), ("E1", "Q Awards")])
def test_a_name_that_holds_the_letter_is_not_replaced(query: str, text: str) -> None:
    handles = EntityHandles()
    handles.add(["Q Awards"])
    assert handles.spell(query, "who?").text == text


def test_minimal_instructions_show_leads_as_handle_name_and_sources() -> None:
    (step,) = play(make_env(BRIEF), search("Q"), query=QUESTION)
    assert step.context is not None
    first = step.context.view.leads[0]
    assert first.entity
    named = f" ({', '.join(first.handles)})" if first.handles else ""
    assert f"Search next: {first.entity} {first.name}{named}" in text_of(step.context)


def test_the_hash_of_an_environment_without_them_is_as_before() -> None:
    assert "handles" not in Env().hashed()["leads"]
    assert Env().hashed() != ON.hashed()
