"""The one loop: every end has its status, faults belong to the infrastructure, equal seeds give equal episodes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from harness1.config import Env, Machine
from harness1.env.environment import SearchEnv, Step
from harness1.env.render import Context
from harness1.env.verifiers import LexicalVerifier
from harness1.episodes.rollout import rollout
from harness1.policy.policy import Decision
from harness1.policy.scripted import RandomPolicy
from harness1.records import Episode, ModelCall, Status, StopReason, Task, encode_episode
from tests.support import CORPUS, END, Script, WordRetriever, call, curate, make_env, run, search, wide_corpus

TASK = Task("t", "Where did the father of Ada Lovelace die?")


def play_script(*actions: Any, env: SearchEnv | None = None, **options: Any) -> Episode:
    return run(rollout(env or make_env(), Script(*actions), TASK, **options))


def ended(episode: Episode) -> tuple[StopReason, Status]:
    return episode.stop_reason, episode.status


def test_a_whole_episode_is_recorded() -> None:
    episode = play_script(
        search("Ada Byron"), curate(add_ids=["D3"], importance={"D3": "high"}), END, sample_idx=2, group_id="g"
    )
    assert ended(episode) == (StopReason.END_SEARCH, Status.COMPLETED)
    assert [turn.index for turn in episode.turns] == [1, 2, 3]
    assert [(entry.unit_id, entry.tag, entry.rank) for entry in episode.curated] == [
        ("byron", "high", 1),
        ("ada", "fair", 2),
        ("babbage", "fair", 3),
    ]
    assert episode.pool == ("ada", "babbage", "byron")
    assert (episode.sample_idx, episode.group_id, episode.error, episode.reward) == (2, "g", None, None)
    assert (episode.hashes.env, episode.hashes.index) == (make_env().hash, "word-index")
    assert all(turn.memory_hash and turn.context_hash and turn.reasoning for turn in episode.turns)
    assert {"policy", "environment"} <= episode.stage_ms.keys()


def test_the_turn_limit_ends_a_complete_episode() -> None:
    episode = play_script(*[search("Ada")] * 5, env=make_env(Env(max_turns=3)))
    assert ended(episode) == (StopReason.TURN_LIMIT, Status.COMPLETED)
    assert len(episode.turns) == 3
    assert episode.curated


def test_a_context_that_does_not_fit_truncates() -> None:
    env = make_env(Env(context_window=2050, generation_reserve=300))
    huge = call("unknown", text="x" * 20_000)
    assert ended(play_script(huge, env=env)) == (StopReason.CONTEXT_LIMIT, Status.TRUNCATED)


@pytest.mark.parametrize("failure", ["no call found", [], "lone \ud800 surrogate"])
def test_an_answer_without_an_action_is_the_policys_error(failure: Any) -> None:
    episode = play_script(search("Ada"), failure)
    assert ended(episode) == (StopReason.FORMAT_LIMIT, Status.POLICY_ERROR)
    last = episode.turns[-1]
    assert (last.index, last.action, last.observation) == (2, None, None)
    assert last.parse_error
    assert last.memory_hash == episode.turns[0].memory_hash
    assert msgspec.json.decode(encode_episode(episode), type=Episode) == episode


def test_a_fault_that_stays_breaks_the_episode_and_is_never_an_empty_result() -> None:
    retriever = WordRetriever(CORPUS)
    seen: list[Step] = []

    def watch(step: Step) -> None:
        seen.append(step)
        retriever.faults = 3

    episode = play_script(search("Ada"), search("Byron"), END, env=make_env(retriever=retriever), on_step=watch)
    assert ended(episode) == (StopReason.FAULT, Status.INFRA_ERROR)
    assert episode.error == "down (3 attempts)"
    assert episode.reward is None
    assert len(episode.turns) == len(seen) == 1
    assert b"nothing_found" not in encode_episode(episode)


@pytest.mark.parametrize("faults", [1, 2])
def test_faults_that_are_retried_away_change_nothing(faults: int) -> None:
    def plain(episode: Episode) -> Episode:
        return msgspec.structs.replace(episode, stage_ms={})

    troubled = play_script(search("Ada"), END, env=make_env(retriever=WordRetriever(CORPUS, faults=faults)))
    assert plain(troubled) == plain(play_script(search("Ada"), END))


class Sleeper(Script):
    """A policy that never answers."""

    def open(self, task: Task, seed: int) -> Any:
        return self

    async def act(self, context: Context) -> Decision:
        await asyncio.sleep(60)
        raise AssertionError


def test_an_episode_that_takes_too_long_is_broken() -> None:
    env = SearchEnv(Env(), WordRetriever(CORPUS), LexicalVerifier(), machine=Machine(episode_deadline_s=0.05))
    episode = run(rollout(env, Sleeper(), TASK))
    assert ended(episode) == (StopReason.FAULT, Status.INFRA_ERROR)
    assert episode.error == "the episode took more than 0.05 s"


@pytest.mark.parametrize("order", ["paper", "epoch"])
def test_equal_seeds_give_equal_bytes(order: str) -> None:
    def line(seed: int) -> bytes:
        config = msgspec.convert({"rendering": {"order": order}}, Env)
        episode = run(rollout(make_env(config, wide_corpus(30)), RandomPolicy(), TASK, seed=seed))
        return encode_episode(msgspec.structs.replace(episode, stage_ms={}))

    assert line(1) == line(1)
    assert line(1) != line(2)


def test_samples_of_a_task_have_ids_of_their_own() -> None:
    ids = {play_script(END, sample_idx=sample, seed=seed).episode_id for sample in (0, 1) for seed in (0, 1)}
    assert len(ids) == 4


class Versioned(Script):
    """A policy whose weights change while it runs."""

    def open(self, task: Task, seed: int) -> Any:
        self.version = 3
        return self

    async def act(self, context: Context) -> Decision:
        self.version += 2
        calls = (ModelCall("c", policy_version_start=self.version, policy_version_end=self.version + 1),)
        return Decision((END,) if self.version > 6 else (search("Ada"),), "", calls)


def test_the_range_of_policy_versions_is_recorded() -> None:
    episode = run(rollout(make_env(), Versioned(), TASK))
    assert episode.policy_versions == (5, 8)
    assert len(episode.turns[0].calls) == 1
