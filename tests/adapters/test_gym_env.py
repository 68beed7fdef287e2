"""The Gymnasium environment passes its own check, and its episodes and rewards are those of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

from harness1.adapters.gym_env import SearchGym, action
from harness1.config import Config, Env
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import InfrastructureFault, UsageError
from harness1.records import DocId, Gold, Status, Task
from harness1.reward import score
from tests.support import CORPUS, END, Script, WordRetriever, curate, make_env, run, search

TASKS = [
    Task("ada", "Where did the father of Ada Lovelace die?", "dev", Gold({DocId("ada"): 1, DocId("byron"): 1})),
    Task("town", "Which town was besieged in 1825?", "dev", Gold({DocId("miss"): 1})),
]


@pytest.fixture
def gym() -> Iterator[SearchGym]:
    made = SearchGym(TASKS, make_env, Config())
    yield made
    made.close()


def test_it_passes_gymnasiums_own_check(gym: SearchGym) -> None:
    check_env(gym, skip_render_check=True)


def test_its_episode_and_reward_are_those_of_an_evaluation(gym: SearchGym) -> None:
    first, info = gym.reset(options={"task_id": "ada"})
    assert TASKS[0].query in first
    assert {tool["function"]["name"] for tool in info["tools"]} >= {"search_corpus", "curate"}
    seen, reward, *ended, _ = gym.step(action("search_corpus", query="Ada Byron"))
    assert "Lord Byron" in seen
    assert (reward, ended) == (0.0, [False, False])
    gym.step(action("curate", remove_ids=["D2"]))
    *_, total, terminated, truncated, info = gym.step(action("end_search", reasoning="done"))
    script = Script(search("Ada Byron"), curate(remove_ids=["D2"]), END)
    same = score(run(rollout(make_env(), script, TASKS[0])), TASKS[0].gold, Config())
    assert (total, terminated, truncated) == (same.reward.total, True, False)
    report = replay_episode(info["episode"], Env())
    assert (report.difference, report.equal) == (None, 3)


def test_a_seed_chooses_the_task(gym: SearchGym) -> None:
    drawn = [gym.reset(seed=seed)[1]["task_id"] for seed in (0, 0, 1, 2, 3, 4)]
    assert drawn[0] == drawn[1]
    assert set(drawn) == {"ada", "town"}


def test_the_turn_limit_truncates() -> None:
    gym = SearchGym(TASKS, lambda: make_env(Env(max_turns=1)), Config())
    gym.reset(seed=0)
    *_, terminated, truncated, info = gym.step(action("search_corpus", query="Ada"))
    assert (terminated, truncated, info["stop_reason"]) == (False, True, "turn_limit")
    gym.close()


@pytest.mark.parametrize(
    "given", ["", "search", "[]", '{"arguments": {}}', '{"name": "search_corpus", "arguments": 3}']
)
def test_what_is_no_call_ends_the_episode_as_a_policy_error(gym: SearchGym, given: str) -> None:
    gym.reset(seed=0)
    *_, reward, terminated, _, info = gym.step(given)
    assert terminated
    assert info["episode"].status is Status.POLICY_ERROR
    assert reward == score(info["episode"], TASKS[0].gold, Config()).reward.total


def test_a_dead_index_raises_and_gives_no_reward() -> None:
    gym = SearchGym(TASKS, lambda: make_env(retriever=WordRetriever(CORPUS, faults=99)), Config())
    gym.reset(seed=0)
    with pytest.raises(InfrastructureFault, match="invalid"):
        gym.step(action("search_corpus", query="Ada"))
    gym.close()


def test_steps_without_an_episode_are_refused(gym: SearchGym) -> None:
    with pytest.raises(UsageError, match="reset"):
        gym.step(action("end_search"))
    for wrong in ("x", ["x"], {"a": 1}, ""):
        with pytest.raises(UsageError, match="no task "):
            gym.reset(options={"task_id": wrong})
    with pytest.raises(UsageError, match="no tasks"):
        SearchGym([], make_env, Config())


def test_an_episode_may_be_left_at_any_time(gym: SearchGym) -> None:
    found: list[Any] = []
    for steps in (0, 1, 2):
        gym.reset(seed=1)
        found.append([gym.step(action("search_corpus", query=f"town {number}"))[0] for number in range(steps)])
    assert found[2][0] == found[1][0]
