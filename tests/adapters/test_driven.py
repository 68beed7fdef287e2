"""Episodes that somebody else drives are those of `rollout`, and nothing of them is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from harness1.adapters.driven import DrivenEpisode, newest_observation
from harness1.config import Env, Machine, load_config
from harness1.env.environment import SearchEnv
from harness1.env.render import Context
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.policy.policy import Decision
from harness1.records import Episode, Status, StopReason, Task, ToolCall
from tests.support import CORPUS, END, Script, WordRetriever, curate, make_env, run, search

TASK = Task("t", "Where did the father of Ada Lovelace die?")
PLAN = (search("Ada Byron"), search("Byron died"), curate(add_ids=["D3"], importance={"D3": "high"}), END)


async def driven(env: SearchEnv, plan: Sequence[ToolCall | Decision] = PLAN, task: Task = TASK) -> DrivenEpisode:
    episode = DrivenEpisode(env, task, "test")
    context = await episode.begin()
    for action in plan:
        if context is not None:
            context = await episode.act(action)
    return episode


def record(episode: DrivenEpisode) -> Episode:
    assert episode.episode is not None
    return episode.episode


def test_it_is_recorded_like_the_same_decisions_of_a_policy() -> None:
    ours, theirs = record(run(driven(make_env()))), run(rollout(make_env(), Script(*PLAN), TASK))
    assert [turn.action for turn in ours.turns] == [turn.action for turn in theirs.turns]
    assert [turn.context_hash for turn in ours.turns][:1] == [turn.context_hash for turn in theirs.turns][:1]
    assert (ours.curated, ours.pool, ours.stop_reason) == (theirs.curated, theirs.pool, StopReason.END_SEARCH)
    assert ours.hashes.env == theirs.hashes.env


def test_a_fault_of_the_index_ends_it_as_invalid() -> None:
    env = make_env(retriever=WordRetriever(CORPUS, faults=99))
    episode = run(driven(env))
    assert episode.context is None
    assert record(episode).status is Status.INFRA_ERROR


def test_a_driver_that_does_not_decide_in_time_ends_it_as_invalid() -> None:
    async def waits() -> DrivenEpisode:
        env = SearchEnv(Env(), WordRetriever(CORPUS), machine=Machine(episode_deadline_s=0.05))
        episode = DrivenEpisode(env, TASK, "test")
        await episode.begin()
        await asyncio.sleep(0.2)
        assert await episode.act(END) is None
        return episode

    assert record(run(waits())).status is Status.INFRA_ERROR


def test_steps_out_of_order_are_refused() -> None:
    async def tries() -> None:
        early = DrivenEpisode(make_env(), TASK, "test")
        with pytest.raises(UsageError, match="awaits no decision"):
            await early.act(END)
        await early.begin()
        with pytest.raises(UsageError, match="begun before"):
            await early.begin()
        await early.act(END)
        with pytest.raises(UsageError, match="is over"):
            await early.act(END)

    run(tries())


def test_closing_leaves_nothing_running_however_often_and_whenever() -> None:
    async def closes() -> None:
        for steps in range(len(PLAN) + 2):
            episode = DrivenEpisode(make_env(), TASK, "test")
            for number in range(steps):
                await (episode.act(PLAN[number - 1]) if number else episode.begin())
            await episode.close()
            await episode.close()
            assert (episode.episode is not None) is (steps > len(PLAN))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(closes())


def test_a_driver_that_is_cancelled_in_a_step_closes_it() -> None:
    class Slow(WordRetriever):
        async def search(self, requests):
            await asyncio.sleep(60)
            return await super().search(requests)

    async def cancels() -> None:
        episode = DrivenEpisode(make_env(retriever=Slow(CORPUS)), TASK, "test")
        await episode.begin()
        step = asyncio.create_task(episode.act(PLAN[0]))
        await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(cancels())


def test_in_a_transcript_the_newest_observations_are_all_that_is_new() -> None:
    config = load_config(None, ["env.rendering.order=transcript"]).env

    async def seen() -> list[Context]:
        episode = DrivenEpisode(make_env(config), TASK, "test")
        found = [await episode.begin(), *[await episode.act(action) for action in PLAN[:3]]]
        await episode.close()
        return [context for context in found if context is not None]

    contexts = run(seen())
    assert newest_observation(contexts[0]) == contexts[0].pieces
    for before, after in pairwise(contexts):
        new = newest_observation(after)
        assert 0 < len(new) < len(after.pieces)
        assert not {it.key for it in new if it.key.startswith("observation")} & {it.key for it in before.pieces}
        assert all(piece.turn_ref is None for piece in new)
