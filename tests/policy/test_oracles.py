"""The oracle curates gold and nothing else, by the tools that everyone has."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import pytest

from harness1.config import Env
from harness1.config.env import with_mechanisms
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.policy.oracles import FOLLOWED, OraclePolicy, needs_of
from harness1.policy.registry import check_policy, needs_gold, open_policy
from harness1.records import ChunkId, DocId, Episode, Gold, Status, StopReason, Task, ToolCall
from harness1.reward.measures import measure_outcome
from tests.support import WordRetriever, chunk, make_env, run

TASK = Task("t", "Where did the father of Ada Lovelace die?")
HOPS = Gold({DocId("ada"): 1, DocId("byron"): 1, DocId("miss"): 1, DocId("noise"): 0})


def episode_of(gold: Gold, **tree: object) -> Episode:
    return run(rollout(make_env(msgspec.convert(with_mechanisms(tree), Env)), OraclePolicy({"t": gold}), TASK))


def units(episode: Episode) -> set[str]:
    return {str(entry.unit_id) for entry in episode.curated}


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"fan_out": {"on": False}},
        {"read": {"on": False}},
        {"curation": {"tags": False}},
        {"auto_populate": {"on": False}},
        {"rendering": {"order": "epoch"}},
        {"compression": {"on": False}, "evidence": {"on": False}, "history": {"on": False}},
    ],
)
def test_it_finds_all_hops_and_delivers_nothing_else_without_any_mechanism(switches: dict[str, object]) -> None:
    episode = episode_of(HOPS, **switches)
    assert (episode.stop_reason, units(episode)) == (StopReason.END_SEARCH, {"ada", "byron", "miss"})
    assert measure_outcome(episode, HOPS).recall == 1.0


def test_gold_that_cannot_be_found_ends_in_time_and_of_a_fact_any_one_chunk_will_do() -> None:
    episode = episode_of(Gold({DocId("ada"): 1, DocId("nowhere"): 1}), max_turns=9)
    assert len(episode.turns) <= 9
    assert units(episode) == {"ada"}
    assert needs_of(HOPS) == (frozenset({"ada"}), frozenset({"byron"}), frozenset({"miss"}))
    gold = Gold({}, facts=((ChunkId("a#0"), ChunkId("b#0")), (ChunkId("c#0"),)))
    assert needs_of(gold) == (frozenset({"a#0", "b#0"}), frozenset({"c#0"}))
    chunks = [chunk("b", "Ada Lovelace wrote."), chunk("c", "Ada Lovelace died."), chunk("d", "Ada Ada.")]
    env = make_env(retriever=WordRetriever(chunks, "chunk"))
    assert units(run(rollout(env, OraclePolicy({"t": gold}), TASK))) == {"b#0", "c#0"}


AT_ONCE = Env().switch(lead_handles=True, tags=False)
ENV = AT_ONCE.switch(fan_out=False)


def episode_of_lead_teacher(*gold: str, seed: int = 0, env: Env = ENV) -> Episode:
    golds = {"t": Gold({DocId(name): 1 for name in gold})}
    return run(rollout(make_env(env), open_policy("lead-teacher", golds), TASK, seed=seed))


def calls(episode: Episode) -> list[ToolCall]:
    assert episode.status is Status.COMPLETED
    return [turn.action for turn in episode.turns if turn.action]


def test_one_search_that_finds_all_is_enough_and_what_none_finds_is_given_up_after_a_few_leads() -> None:
    episode = episode_of_lead_teacher("ada")
    assert [call.name for call in calls(episode)] == ["search_corpus", "curate", "end_search"]
    assert units(episode) == {"ada"}
    episode = episode_of_lead_teacher("nowhere")
    assert 1 < [call.name for call in calls(episode)].count("search_corpus") <= 1 + FOLLOWED
    assert len(episode.curated) == 2


def test_it_searches_only_what_the_view_offers_and_samples_differ_in_what_they_follow() -> None:
    followed = set()
    for seed in range(8):
        made = calls(episode_of_lead_teacher("nowhere", seed=seed))
        searched = [str(call.arguments["query"]) for call in made if call.name == "search_corpus"]
        assert searched[0] == "Q"
        assert all(query.startswith("E") for query in searched[1:])
        followed.add(tuple(searched))
    assert len(followed) > 1


def test_leads_are_followed_at_once_where_one_call_can_each_once_even_if_nothing_is_missing() -> None:
    episode = episode_of_lead_teacher("ada", env=AT_ONCE)
    first, *rest = calls(episode)
    assert first.arguments == {"query": "Q"}
    assert [call.name for call in rest] == ["fan_out_search", "curate", "end_search"]
    assert len(rest[0].arguments["queries"]) > 1
    assert all(query.startswith("E") for query in rest[0].arguments["queries"])
    assert units(episode) == {"ada"}
    for seed in range(4):
        _, *made = calls(episode_of_lead_teacher("nowhere", seed=seed, env=AT_ONCE))
        named = [lead for call in made for lead in call.arguments.get("queries", [call.arguments.get("query")]) if lead]
        assert len(named) == len(set(named)) > 1


SPECS = ("oracle", "oracle-teacher", "silent:lead-teacher", "mixed:0.5", "silent:mixed:0.5", "mixed:1", "silent:random")


@pytest.mark.parametrize("spec", SPECS)
def test_a_policy_made_by_name_plays_and_refuses_to_play_without_the_gold_that_it_needs(spec: str) -> None:
    check_policy(spec)
    needed = "random" not in spec
    assert needs_gold(spec) == needed
    assert run(rollout(make_env(ENV), open_policy(spec, {"t": HOPS}), TASK)).turns
    with pytest.raises(UsageError, match="gold of task t") if needed else nullcontext():
        run(rollout(make_env(ENV), open_policy(spec), TASK))
