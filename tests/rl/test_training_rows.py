"""Groups of episodes become rows: who is compared with whom, what a token counts, and which rows make a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import fmean, stdev
from typing import get_args

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from trl.trainer.utils import nanstd

from harness1.config import Rl
from harness1.records import (
    Curated,
    DocId,
    Episode,
    Gold,
    Hashes,
    ModelCall,
    Observation,
    RewardRecord,
    RewardTerm,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
    UnitId,
)
from harness1.rl.rollouts import EpisodeGroup
from harness1.rl.rows import (
    STD_EPSILON,
    Kind,
    advantages,
    batch_metrics,
    episode_metrics,
    has_signal,
    substeps,
    training_rows,
)
from harness1.rows import TrainRow
from tests.policy.test_language_model import NONSENSE, episode_of, sayer
from tests.support import call, curate, search

OUTPUT = 4
"""Tokens that a made turn says."""


def made_episode(name: str, turns: int, reward: float | None, status: Status = Status.COMPLETED) -> Episode:
    """An episode of turns that continue each other, of which each says four tokens."""
    made: list[Turn] = []
    prompt: tuple[str, ...] = ("start",)
    for index in range(1, turns + 1):
        said = ModelCall(
            call_id=f"{index}.0",
            prompt=prompt,
            output_ids=tuple(range(10 * index, 10 * index + OUTPUT)),
            output_logprobs=(-0.5,) * OUTPUT,
            policy_version_start=index,
            policy_version_end=index + 1,
        )
        made.append(Turn(index, (said,), action=ToolCall("search_corpus")))
        prompt = (*prompt, f"call/{said.call_id}", "answer")
    return Episode(
        episode_id=name,
        task=Task("t", "a question"),
        turns=tuple(made),
        stop_reason=StopReason.END_SEARCH,
        status=status,
        reward=None if reward is None else RewardRecord(reward),
        hashes=Hashes("", "", ""),
        segments={"start": (1, 2, 3), "answer": (7, 8)},
    )


def group(index: int, *episodes: Episode) -> EpisodeGroup:
    return EpisodeGroup(index, 0, episodes)


def value_of(row: TrainRow) -> float:
    """The advantage of a row whose trained tokens all have the same; what is not trained has none."""
    assert row.advantages is not None
    assert not any(value for value, mask in zip(row.advantages, row.loss_mask, strict=True) if not mask)
    (value,) = {value for value, mask in zip(row.advantages, row.loss_mask, strict=True) if mask}
    return value


def values_of(rows: Sequence[TrainRow]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.episode_id, []).append(value_of(row))
    return found


def test_every_turn_of_an_episode_has_the_advantage_of_the_episode() -> None:
    rows = training_rows([group(5, made_episode("a", 2, 3.0), made_episode("b", 1, 1.0))], Rl())
    assert values_of(rows) == {"a": [1.0, 1.0], "b": [-1.0]}
    assert {row.group_id for row in rows} == {"5"}
    assert [row.versions for row in rows] == [(1, 2), (2, 3), (1, 2)]
    assert all(row.rollout_logprobs is not None for row in rows)


def test_a_merged_row_is_stamped_on_what_was_sampled_alone() -> None:
    row, other = training_rows([group(0, made_episode("a", 2, 3.0), made_episode("b", 1, 1.0))], Rl(rows="epoch"))
    assert row.loss_mask == (0,) * 3 + (1,) * 4 + (0,) * 2 + (1,) * 4
    assert row.advantages == (0.0,) * 3 + (1.0,) * 4 + (0.0,) * 2 + (1.0,) * 4
    assert (row.versions, other.versions) == ((1, 3), (1, 2))


def test_what_the_infrastructure_broke_is_neither_compared_with_nor_trained() -> None:
    kept = [made_episode("a", 1, 3.0), made_episode("wrong", 2, -1.0, Status.POLICY_ERROR)]
    broken = [
        made_episode("fault", 1, 9.0, Status.INFRA_ERROR),
        made_episode("unscored", 1, None),
        replace(made_episode("unknown", 1, 9.0), untrainable="no log probabilities"),
    ]
    rows = training_rows([group(0, broken[0], kept[0], *broken[1:], kept[1])], Rl())
    assert rows == training_rows([group(0, *kept)], Rl())
    assert values_of(rows) == {"a": [2.0], "wrong": [-2.0, -2.0]}


def test_one_that_is_left_alone_has_no_advantage() -> None:
    for kind in ("center", "group_std", "batch_std", "leave_one_out"):
        rows = training_rows([group(0, made_episode("a", 2, 3.0), made_episode("b", 1, None))], Rl(advantages=kind))
        assert values_of(rows) == {"a": [0.0, 0.0]}


def test_groups_stand_in_order_whatever_order_they_came_in() -> None:
    groups = [group(at, made_episode(f"{at}/a", 3, 1.0), made_episode(f"{at}/b", 1, 0.0)) for at in range(12)]
    rows = training_rows(groups, Rl())
    assert training_rows(Random(0).sample(groups, 12), Rl()) == rows
    assert [row.group_id for row in rows] == [str(at) for at in range(12) for _ in range(4)]
    assert [row.call_ids for row in rows[:4]] == [("0/a/1.0",), ("0/a/2.0",), ("0/a/3.0",), ("0/b/1.0",)]


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 9))
def test_steps_share_whole_groups_as_evenly_as_can_be(groups: int, count: int, seed: int) -> None:
    rows = [TrainRow((at, turn), (0, 1), group_id=str(at)) for at in range(groups) for turn in range(1 + at % 3)]
    steps = substeps(rows, count, seed)
    assert steps == substeps(rows, count, seed)
    assert groups == 1 or any(substeps(rows, count, seed + more) != steps for more in range(1, 40))
    assert len(steps) == min(count, groups)
    assert sorted(row.token_ids for step in steps for row in step) == [row.token_ids for row in rows]
    sizes = [len({row.group_id for row in step}) for step in steps]
    assert sum(sizes) == groups
    assert max(sizes) - min(sizes) <= 1
    for step in steps:
        assert (
            sum(one.group_id != other.group_id for one, other in pairwise(step)) == len({r.group_id for r in step}) - 1
        )


def spoken(order: str, *actions: ToolCall | str, name: str, reward: float) -> Episode:
    """An episode of a model's own words, in the format and the environment of the other tests."""
    episode = episode_of(sayer(*actions), order)
    return replace(episode, episode_id=name, reward=RewardRecord(reward))


def siblings(order: str) -> EpisodeGroup:
    """Two search for rivers first, and one of them says nonsense in between. A third finds nothing, then fails."""
    return group(
        3,
        spoken(order, search("river"), NONSENSE, search("war"), curate(add_ids=["D1"]), name="a", reward=2.0),
        spoken(order, search("river"), search("town"), call("end_search"), name="b", reward=0.5),
        spoken(order, search("nowhere"), NONSENSE, NONSENSE, NONSENSE, NONSENSE, name="c", reward=-0.5),
    )


KINDS: tuple[Kind, ...] = get_args(Kind)
GROUPS = [[1.0, 2.0, 6.0], [0.5, 0.5], [4.0], []]
Rewards = st.lists(st.lists(st.floats(-10, 10), max_size=5), max_size=4)


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [([], False), ([1.0], False), ([1.0, 1.0 + 1e-12], False), ([0.1 + 0.2, 0.3], False), ([1.0, 1.001], True)],
)
def test_equal_rewards_are_no_signal(rewards: list[float], signal: bool) -> None:
    assert has_signal(rewards) is signal


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
    assert advantages(GROUPS, "center") == [[-2.0, -1.0, 3.0], [0.0, 0.0], [0.0], []]
    for rewards, values in zip(groups, advantages(groups, "leave_one_out"), strict=True):
        for at, (reward, value) in enumerate(zip(rewards, values, strict=True)):
            others = rewards[:at] + rewards[at + 1 :]
            assert value == pytest.approx(reward - fmean(others) if others else 0.0, abs=1e-9)


GOLD = Gold({DocId("d"): 1, DocId("e"): 1})


def episode(name: str, reward: RewardRecord, tools: str = "", **fields: object) -> Episode:
    names = {"s": "search_corpus", "c": "curate"}
    turns = tuple(
        Turn(index=at, action=ToolCall(names[tool]), observation=Observation(names[tool]))
        for at, tool in enumerate(tools, 1)
    )
    plain = {"stop_reason": StopReason.END_SEARCH, "status": Status.COMPLETED, "reward": reward}
    return Episode(episode_id=name, task=Task("t", "q"), turns=turns, hashes=Hashes("e", "p", "i"), **(plain | fields))


GOOD = episode(
    "good",
    RewardRecord(1.5, {"outcome": RewardTerm(0.5, 2.0), "answer": RewardTerm(0.5, 1.0)}),
    "ssc",
    curated=(Curated(UnitId("d"), "high", 1), Curated(UnitId("x"), "fair", 2)),
    policy_versions=(3, 5),
)
LOST = episode(
    "lost",
    RewardRecord(-0.5, {"outcome": RewardTerm(0.0, 2.0)}, "format_failure"),
    "s",
    stop_reason=StopReason.FORMAT_LIMIT,
    status=Status.POLICY_ERROR,
    policy_versions=(4, 4),
)
BROKEN = episode("broken", RewardRecord(0.0), status=Status.INFRA_ERROR, stop_reason=StopReason.FAULT)


def test_means_are_over_episodes_and_shares_over_turns() -> None:
    found = episode_metrics([GOOD, LOST, BROKEN], lambda _: GOLD)
    assert found["reward"] == 0.5
    assert (found["curated_recall"], found["precision"], found["set_size"]) == (0.25, 0.25, 1.0)
    assert (found["turns"], found["format_failures"], found["ended"]) == (2.0, 0.5, 0.5)
    assert (found["tool/search_corpus"], found["tool/curate"]) == (0.75, 0.25)


def test_the_terms_add_up_to_the_reward_with_overrides_in_their_place() -> None:
    found = episode_metrics([GOOD, LOST], lambda _: GOLD)
    terms = {name: value for name, value in found.items() if name.startswith("term/")}
    assert terms == {"term/outcome": 0.5, "term/answer": 0.25, "term/format_failure": -0.25}
    assert sum(terms.values()) == found["reward"]


def test_a_group_is_as_old_as_its_oldest_call() -> None:
    newer = msgspec.structs.replace(LOST, policy_versions=(6, 6))
    groups = [EpisodeGroup(0, 3, (GOOD, LOST)), EpisodeGroup(1, 6, (newer, newer))]
    found = batch_metrics(groups, 7, lambda _: GOLD)
    assert (found["staleness"], found["staleness_max"]) == (2.5, 4.0)
    assert found["reward_std"] == pytest.approx(0.5)


def test_nothing_is_said_of_no_episodes() -> None:
    assert episode_metrics([BROKEN], lambda _: GOLD) == {}
