"""Sessions for OpenEnv's trainers hold the tokens of our own rows. Run by `make test-adapters`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness1.config import Config
from harness1.env.render import Context
from harness1.errors import UsageError
from harness1.policy.policy import Decision
from harness1.records import DocId, Gold, ModelCall, Task, ToolCall
from harness1.rows import per_request
from harness1.rows.calls import calls_for_rows
from tests.support import CORPUS, END, WordRetriever, make_env, search

pytest.importorskip("openenv", reason="openenv is not installed")

from harness1.adapters.openenv import SearchSession, SearchSessions

TASKS = [
    Task("ada", "Where did the father of Ada Lovelace die?", "train", Gold({DocId("ada"): 1, DocId("byron"): 1})),
    Task("town", "Which town was besieged in 1825?", "train", Gold({DocId("miss"): 1})),
]


class Sampled:
    """A policy whose calls have made-up tokens and log probabilities."""

    name, hash = "sampled", "sampled"

    def open(self, task: Task, seed: int) -> Sampled:
        return self

    def fork(self) -> Sampled:
        return self

    async def act(self, context: Context) -> Decision:
        key, turn = f"prompt-{context.turn}", context.turn
        ids = tuple(range(turn, turn + 4))
        call = ModelCall(f"{turn}.0", prompt=(key,), output_ids=ids, output_logprobs=(-0.5,) * 4)
        action: ToolCall = search("Ada Byron") if turn == 1 else END
        return Decision((action,), calls=(call,), segments={key: tuple(range(100, 105 + turn))})


def sessions(faults: int = 0) -> SearchSessions:
    return SearchSessions(TASKS, lambda: make_env(retriever=WordRetriever(CORPUS, faults=faults)), Sampled(), Config())


def finished(session: SearchSession) -> SearchSession:
    assert session.wait_for_completion(10.0) == 0
    return session


def test_a_trace_has_the_rows_of_per_request() -> None:
    session = finished(sessions().create("ada"))
    assert session.episode is not None
    rows = per_request(calls_for_rows(session.episode))
    turns = session.fetch_training_trace().turns
    assert [tuple(at.prompt_token_ids + at.completion_token_ids) for at in turns] == [row.token_ids for row in rows]
    assert [tuple(turn.loss_mask) for turn in turns] == [row.loss_mask for row in rows]
    for turn, row in zip(turns, rows, strict=True):
        assert [0.0] * len(turn.prompt_token_ids) + turn.per_token_logps == list(row.rollout_logprobs or ())


def test_the_reward_is_that_of_the_episode() -> None:
    session = finished(sessions().create({"task_id": "ada"}))
    found = session.verify([])
    assert (found.env_reward, found.done) == (session.episode.reward.total, True)
    assert found.metrics["recall"] > 0


def test_all_samples_of_a_group_get_one_task() -> None:
    made = sessions()
    queries = {made.create(None, 3, name).initial_messages()[0]["content"] for name in ("a", "b", "c")}
    assert queries == {TASKS[1].query}
    with pytest.raises(UsageError, match="no task 'x'"):
        made.create("x")


def test_a_broken_episode_has_no_rows_and_no_reward() -> None:
    session = sessions(faults=99).create("ada")
    assert session.wait_for_completion() == 1
    assert session.fetch_training_trace().turns == []
    assert session.verify([]).env_reward is None


def test_a_session_that_takes_too_long_fails() -> None:
    class Slow(WordRetriever):
        async def search(self, requests: Any) -> Any:
            await asyncio.sleep(60)

    made = SearchSessions(TASKS, lambda: make_env(retriever=Slow(CORPUS)), Sampled(), Config())
    session = made.create("ada")
    assert session.wait_for_completion(0.05) == 1
    assert session.verify([]).env_reward is None
