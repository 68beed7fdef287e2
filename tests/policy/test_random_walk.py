"""The random policy takes legal actions, the same ones for the same seed."""

from __future__ import annotations

import pytest

from harness1.config import Env, FanOut, Grep, Read, Review, Verification
from harness1.episodes.rollout import rollout
from harness1.policy.scripted import RandomPolicy
from harness1.records import Episode, Task
from tests.support import make_env, run, wide_corpus

WORLD = wide_corpus(30)
TASK = Task("t", "Which river castle did Ada see?")


def episode(seed: int, env: Env | None = None, task: Task = TASK) -> Episode:
    return run(rollout(make_env(env, WORLD), RandomPolicy(), task, seed=seed))


@pytest.mark.parametrize("seed", range(8))
def test_every_action_is_carried_out(seed: int) -> None:
    for turn in episode(seed).turns:
        assert turn.observation is not None
        assert turn.observation.error is None, turn.action


def test_all_tools_are_used() -> None:
    names = {turn.action.name for seed in range(20) for turn in episode(seed).turns if turn.action}
    assert names == {spec.name for spec in make_env().toolbox.specs}


def test_the_seed_and_the_task_decide() -> None:
    def actions(seed: int, task: Task = TASK) -> list[object]:
        return [turn.action for turn in episode(seed, task=task).turns]

    assert actions(3) == actions(3)
    assert actions(3) != actions(4)
    assert actions(3) != actions(3, Task("u", TASK.query))


def test_it_lives_with_few_tools() -> None:
    off = Env(
        fan_out=FanOut(on=False),
        grep=Grep(on=False),
        read=Read(on=False),
        review=Review(on=False),
        verification=Verification(on=False),
    )
    names = {turn.action.name for seed in range(5) for turn in episode(seed, off).turns if turn.action}
    assert names == {"search_corpus", "curate", "end_search"}
