"""The lead teacher searches what the harness offers, stops when the gold is found, and delivers it."""

from __future__ import annotations

import msgspec

from harness1.config import Curation, Env, FanOut, Leads
from harness1.episodes.rollout import rollout
from harness1.policy.oracles import FOLLOWED
from harness1.policy.registry import open_policy
from harness1.records import DocId, Episode, Gold, Status, Task
from tests.support import make_env, run

TASK = Task("t", "Where did the father of Ada Lovelace die?")
AT_ONCE = Env(leads=Leads(handles=True), curation=Curation(tags=False))
ENV = msgspec.structs.replace(AT_ONCE, fan_out=FanOut(on=False))


def episode_of(*gold: str, seed: int = 0, env: Env = ENV) -> Episode:
    golds = {"t": Gold({DocId(name): 1 for name in gold})}
    return run(rollout(make_env(env), open_policy("lead-teacher", golds), TASK, seed=seed))


def actions(episode: Episode) -> list[str]:
    return [turn.action.name for turn in episode.turns if turn.action]


def test_one_search_that_finds_all_is_enough() -> None:
    episode = episode_of("ada")
    assert actions(episode) == ["search_corpus", "curate", "end_search"]
    assert [str(entry.unit_id) for entry in episode.curated] == ["ada"]
    assert episode.status is Status.COMPLETED


def test_gold_that_no_search_finds_is_given_up_after_a_few_leads() -> None:
    episode = episode_of("nowhere")
    assert 1 < actions(episode).count("search_corpus") <= 1 + FOLLOWED
    assert len(episode.curated) == 2
    assert episode.status is Status.COMPLETED


def test_it_searches_only_what_the_view_offers() -> None:
    for seed in range(4):
        episode = episode_of("nowhere", seed=seed)
        calls = [turn.action for turn in episode.turns if turn.action]
        searched = [str(call.arguments["query"]) for call in calls if call.name == "search_corpus"]
        assert searched[0] == "Q"
        assert all(query.startswith("E") for query in searched[1:])


def test_samples_of_a_task_differ_in_the_leads_that_they_follow() -> None:
    found = {tuple(str(turn.action) for turn in episode_of("nowhere", seed=seed).turns) for seed in range(12)}
    assert len(found) > 1


def test_leads_are_followed_at_once_where_one_call_can_and_once_even_if_nothing_is_missing() -> None:
    episode = episode_of("ada", env=AT_ONCE)
    first, *rest = (turn.action for turn in episode.turns if turn.action)
    assert first.arguments == {"query": "Q"}
    assert [call.name for call in rest] == ["fan_out_search", "curate", "end_search"]
    assert len(rest[0].arguments["queries"]) > 1
    assert all(query.startswith("E") for query in rest[0].arguments["queries"])
    assert [str(entry.unit_id) for entry in episode.curated] == ["ada"]


def test_no_lead_is_followed_twice() -> None:
    for seed in range(4):
        calls = [turn.action for turn in episode_of("nowhere", seed=seed, env=AT_ONCE).turns if turn.action]
        leads = [lead for call in calls for lead in call.arguments.get("queries", [call.arguments.get("query", "Q")])]
        named = [lead for lead in leads if lead != "Q"]
        assert len(named) == len(set(named)) > 1
