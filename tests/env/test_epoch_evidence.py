"""Inside an epoch, a turn that changed the evidence says so."""

from __future__ import annotations

from itertools import pairwise

from harness1.config import Env, Evidence, Rendering
from harness1.env.environment import Step
from tests.support import chunk, curate, make_env, play, search, wide_corpus

EPOCH = Rendering(order="epoch", epoch_turns=5)
ACTIONS = (search("Ada Lovelace"), search("Lord Byron"), search("nothing of the kind"))


def kinds(step: Step) -> list[str]:
    assert step.context is not None
    return [each.key.split("#")[0] for each in step.context.pieces]


def test_the_order_and_the_leads_are_those_of_the_memory_at_each_turn() -> None:
    env = make_env(Env(rendering=EPOCH))
    for count in range(1, len(ACTIONS) + 1):
        step = play(env, *ACTIONS[:count])[-1]
        assert step.context is not None
        handles, found = step.context.view.ranked, env.state.memory.assess()
        assert [env.state.memory.pool.resolve(handle) for handle in handles] == list(found.units)
        assert [lead.name for lead in step.context.view.leads] == [lead.name for lead in found.leads]


def test_what_did_not_change_is_not_said_again() -> None:
    steps = play(make_env(Env(rendering=EPOCH)), search("Ada Lovelace"), curate(add_ids=["D1"]))
    assert [kinds(step).count("ranked") for step in steps] == [1, 1]


def test_without_ranking_nothing_is_appended() -> None:
    steps = play(make_env(Env(rendering=EPOCH, evidence=Evidence(rank=False))), *ACTIONS)
    assert all("ranked" not in kinds(step) and "leads" not in kinds(step) for step in steps)


def test_each_prompt_of_an_epoch_begins_with_the_last_one() -> None:
    steps = play(make_env(Env(rendering=EPOCH)), *ACTIONS)
    shown = [step.context.pieces for step in steps if step.context is not None]
    for before, after in pairwise(shown):
        assert [each.key for each in after[: len(before)]][:-1] == [each.key for each in before][:-1]


def test_a_closed_lead_is_taken_back() -> None:
    chunks = [chunk("a", "Rain fell for days.", "Rain"), chunk("b", "A poem.", "The lady of the lake")]
    env = make_env(Env(rendering=EPOCH), chunks)
    steps = play(env, search("rain"), search("the lady of the lake"), query="Who wrote “the lady of the lake”?")
    views = [step.context.view for step in steps if step.context is not None]
    assert [len(view.leads) for view in views] == [1, 0]


def test_an_order_that_a_new_epoch_shows_is_not_said_again() -> None:
    env = make_env(Env(rendering=Rendering(order="epoch", epoch_turns=3)), wide_corpus(40))
    searches = [search(words) for words in ("river castle", "engine program", "poet town")]
    steps = play(env, *searches, curate(add_ids=["D1"]), curate(add_ids=["D2"]))
    assert [kinds(step).count("ranked") for step in steps[2:]] == [1, 1, 1]
