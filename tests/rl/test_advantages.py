"""Advantages compare an episode with its siblings, and a turn with turns in the same state."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from harness1.config import AutoPopulate, Env, Evidence, Search
from harness1.env.environment import SearchEnv
from harness1.episodes.replay import replay_env
from harness1.episodes.rollout import rollout
from harness1.errors import ConfigError
from harness1.records import Episode, Task
from harness1.rl.advantages import STD_EPSILON, Kind, advantages, anchor_advantages, anchor_keys, discounted, has_signal
from tests.support import END, Script, curate, make_env, run, search

KINDS: tuple[Kind, ...] = get_args(Kind)
GROUPS = [[1.0, 2.0, 6.0], [0.5, 0.5], [4.0], []]
Rewards = st.lists(st.lists(st.floats(-10, 10), max_size=5), max_size=4)


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [([], False), ([1.0], False), ([1.0, 1.0 + 1e-12], False), ([0.1 + 0.2, 0.3], False), ([1.0, 1.001], True)],
)
def test_equal_rewards_are_no_signal(rewards: list[float], signal: bool) -> None:
    assert has_signal(rewards) is signal


def test_center_and_leave_one_out_by_hand() -> None:
    assert advantages(GROUPS, "center") == [[-2.0, -1.0, 3.0], [0.0, 0.0], [0.0], []]
    assert advantages(GROUPS, "leave_one_out") == [[-3.0, -1.5, 4.5], [0.0, 0.0], [0.0], []]


def test_group_std_is_that_of_trl() -> None:
    rewards = torch.tensor([GROUPS[0], [0.3, 0.1, -2.0]], dtype=torch.float64)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (nanstd(rewards, dim=1, keepdim=True) + 1e-4)
    found = torch.tensor(advantages(rewards.tolist(), "group_std"), dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_batch_std_is_of_what_is_left_when_tasks_are_made_equally_hard() -> None:
    scale = stdev([-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]) + STD_EPSILON
    easy = [[reward + 100 for reward in GROUPS[0]], *GROUPS[1:]]
    for groups in (GROUPS, easy):
        found = advantages(groups, "batch_std")
        assert found[0] == pytest.approx([-2.0 / scale, -1.0 / scale, 3.0 / scale])
        assert found[1:] == [[0.0, 0.0], [0.0], []]


@given(Rewards, st.sampled_from(KINDS))
def test_of_each_kind_a_group_adds_up_to_nothing_and_keeps_its_order(groups: list[list[float]], kind: Kind) -> None:
    found = advantages(groups, kind)
    assert [len(each) for each in found] == [len(each) for each in groups]
    for rewards, values in zip(groups, found, strict=True):
        assert sum(values) == pytest.approx(0.0, abs=1e-6)
        assert sorted(rewards) == [reward for _, reward in sorted(zip(values, rewards, strict=True))]


@given(Rewards)
def test_leave_one_out_is_what_is_above_the_mean_of_the_others(groups: list[list[float]]) -> None:
    for rewards, values in zip(groups, advantages(groups, "leave_one_out"), strict=True):
        for at, (reward, value) in enumerate(zip(rewards, values, strict=True)):
            others = rewards[:at] + rewards[at + 1 :]
            assert value == pytest.approx(reward - fmean(others) if others else 0.0, abs=1e-9)


def test_a_turn_is_compared_with_all_turns_in_its_state() -> None:
    """The second episode was twice in the state a; nobody but the third was ever in d."""
    found = anchor_advantages([3.0, 0.0, 6.0], [["a", "b"], ["a", "a", "c"], ["b", "c", "d"]])
    assert found == [[2.0, -1.5], [-1.0, -1.0, -3.0], [1.5, 3.0, 0.0]]


def episode(*actions: object, env: Env | None = None) -> Episode:
    task = Task("t", "Where did the father of Ada Lovelace die?")
    return run(rollout(make_env(env), Script(*actions), task))  # type: ignore[arg-type]


def test_the_states_of_turns_are_those_that_a_replay_comes_through() -> None:
    made = episode(search("Ada Byron"), curate(remove_ids=["D1"]), search("Greece town"), "no call at all")
    twin: SearchEnv = replay_env(made, Env())
    expected = []
    for turn in made.turns:
        expected.append(twin.state.memory.anchor_key())
        if turn.action is not None:
            twin.replay(turn)
    assert made.turns[-1].action is None
    assert anchor_keys(made, Env()) == tuple(expected)
    assert len(set(expected)) == 4


def test_the_names_that_a_question_begins_with_count_in_its_states() -> None:
    env = Env(evidence=Evidence(handles=True), auto_populate=AutoPopulate(on=False))
    made = episode(search("E1"), search("E2"), search("E2"), END, env=env)
    assert [turn.observation.error for turn in made.turns if turn.observation] == [None] * 4
    twin: SearchEnv = replay_env(made, env)
    expected = []
    for turn in made.turns:
        expected.append(twin.state.memory.anchor_key())
        twin.replay(turn)
    assert anchor_keys(made, env) == tuple(expected)


def test_siblings_that_came_to_one_state_by_other_ways_meet_in_it() -> None:
    env = Env(auto_populate=AutoPopulate(on=False))
    one = episode(search("Lovelace program"), search("besieged town"), END, env=env)
    other = episode(search("besieged town"), search("Lovelace program"), END, env=env)
    first, second = anchor_keys(one, env), anchor_keys(other, env)
    assert [mine == theirs for mine, theirs in zip(first, second, strict=True)] == [True, False, True]


def test_the_states_of_another_environment_are_not_made_up() -> None:
    with pytest.raises(ConfigError, match="environment"):
        anchor_keys(episode(END), Env(search=Search(hits=3)))


@given(st.floats(-5, 5), st.integers(0, 30), st.floats(0.01, 1.0))
def test_returns_obey_the_recursion_of_a_reward_that_comes_last(advantage: float, turns: int, discount: float) -> None:
    found, following = discounted(advantage, turns, discount), 0.0
    for at in reversed(range(turns)):
        following = (advantage if at == turns - 1 else 0.0) + discount * following
        assert found[at] == pytest.approx(following)
    assert discounted(advantage, turns, 1.0) == [advantage] * turns
