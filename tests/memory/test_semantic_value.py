"""Likeness by embeddings as evidence: what it ranks, and that records keep it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from harness1.config import Config, Dense, Env, Evidence, Index, Retrieval
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import replay_episode, rollout
from harness1.memory.ranking import FEATURES, FITTED, weights_for
from harness1.memory.working_memory import WorkingMemory
from harness1.policy.registry import open_policy
from harness1.records import Hit, Ranking, Task
from harness1.retrieval.build import build_index
from harness1.retrieval.retriever import open_embedded
from tests.support import hit

SEMANTIC = FEATURES.index("semantic")


def found(*hits: Hit) -> WorkingMemory:
    memory = WorkingMemory.empty("Which poet?", "document")
    memory.absorb(hits, Env())
    memory.take_rankings([Ranking("Which poet?", tuple(each.chunk_id for each in hits))], hits, Env())
    return memory


def like(unit: str, likeness: float | None, rank: int = 0) -> Hit:
    return structs.replace(hit(unit, f"A poet wrote {unit}.", unit, rank=rank), likeness=likeness)


def test_units_are_placed_by_likeness_and_equals_share_a_place() -> None:
    memory = found(like("one", 0.3), like("two", 0.8), like("three", 0.8), like("four", None))
    places = memory.value.features(memory.query)[0][:, SEMANTIC].tolist()
    assert places == pytest.approx([1 / 1.4, 1.0, 1.0, 0.0])


def test_the_likest_comes_before_what_else_is_equal() -> None:
    hits = [like("one", 0.1), like("two", 0.9)]
    assert list(found(*hits).assess().units) == ["two", "one"]
    alone = structs.replace(hit("rain", "It rained.", "Rain"), likeness=0.9)
    assert found(alone).assess().reasons() == ["close in meaning"]


def test_the_weights_for_embeddings_count_only_where_a_likeness_is_known() -> None:
    for each, weights in ((like("one", 0.5), FITTED.embeddings), (like("one", None), FITTED.terms)):
        memory = found(each)
        assert weights_for(memory.value.features(memory.query)[0]).tolist() == list(structs.astuple(weights))


@pytest.mark.parametrize("ranks", [True, False])
def test_likeness_is_recorded_where_units_are_ranked_and_replays_without_a_model(tmp_path: Path, ranks: bool) -> None:
    source = open_source("world:60")
    build_index(list(source.documents()), tmp_path, Index(dense=Dense(model="hash:64")))
    env = Env(evidence=Evidence(rank=ranks), retrieval=Retrieval(mode="hybrid"))
    retriever = open_embedded(tmp_path, Config(env=env))
    task = Task("t", source.tasks("test")[0].query)
    episode = asyncio.run(rollout(SearchEnv(env, retriever), open_policy("scripted"), task))
    likenesses = [each.likeness for observation in episode.observations for each in observation.hits]
    assert likenesses
    assert all((likeness is not None) is ranks for likeness in likenesses)
    assert replay_episode(episode, env).difference is None
