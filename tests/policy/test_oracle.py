"""The oracle curates gold and nothing else, by the tools that everyone has."""

from __future__ import annotations

import msgspec
import pytest

from harness1.config import Env
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.policy.oracles import OraclePolicy, needs_of
from harness1.records import ChunkId, DocId, Episode, Gold, StopReason, Task
from harness1.reward.measures import measure_outcome
from tests.support import WordRetriever, chunk, make_env, run

TASK = Task("t", "Where did the father of Ada Lovelace die?")
HOPS = Gold({DocId("ada"): 1, DocId("byron"): 1, DocId("miss"): 1, DocId("noise"): 0})


def episode_of(gold: Gold, **tree: object) -> Episode:
    env = make_env(msgspec.convert(tree, Env))
    return run(rollout(env, OraclePolicy({"t": gold}), TASK))


def test_it_finds_all_hops_and_delivers_nothing_else() -> None:
    episode = episode_of(HOPS)
    assert episode.stop_reason is StopReason.END_SEARCH
    assert {entry.unit_id for entry in episode.curated} == {"ada", "byron", "miss"}
    assert measure_outcome(episode, HOPS).recall == 1.0


@pytest.mark.parametrize(
    "switches",
    [
        {"fan_out": {"on": False}},
        {"read": {"on": False}},
        {"curation": {"tags": False}},
        {"auto_populate": {"on": False}},
        {"rendering": {"order": "epoch"}},
        {"compression": {"on": False}, "evidence": {"on": False}, "history": {"on": False}},
    ],
)
def test_it_works_without_any_mechanism(switches: dict[str, object]) -> None:
    assert {entry.unit_id for entry in episode_of(HOPS, **switches).curated} == {"ada", "byron", "miss"}


def test_gold_that_cannot_be_found_ends_in_time_with_what_was_found() -> None:
    gold = Gold({DocId("ada"): 1, DocId("nowhere"): 1})
    episode = episode_of(gold, max_turns=9)
    assert len(episode.turns) <= 9
    assert [entry.unit_id for entry in episode.curated] == ["ada"]


def test_of_a_fact_any_one_chunk_will_do() -> None:
    gold = Gold({}, facts=((ChunkId("a#0"), ChunkId("b#0")), (ChunkId("c#0"),)))
    assert needs_of(gold) == (frozenset({"a#0", "b#0"}), frozenset({"c#0"}))
    chunks = [chunk("b", "Ada Lovelace wrote."), chunk("c", "Ada Lovelace died."), chunk("d", "Ada Ada.")]
    env = make_env(retriever=WordRetriever(chunks, "chunk"))
    episode = run(rollout(env, OraclePolicy({"t": gold}), TASK))
    assert {entry.unit_id for entry in episode.curated} == {"b#0", "c#0"}


def test_only_relevant_grades_are_wanted() -> None:
    assert needs_of(HOPS) == (frozenset({"ada"}), frozenset({"byron"}), frozenset({"miss"}))


def test_without_gold_it_refuses() -> None:
    with pytest.raises(UsageError, match="gold of task t"):
        OraclePolicy({}).open(TASK, 0)
