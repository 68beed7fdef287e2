"""Advantages compare an episode with its siblings."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from harness1.rl.rows import STD_EPSILON, Kind, advantages, has_signal

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
