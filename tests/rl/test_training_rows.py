"""Groups of episodes become rows: who is compared with whom, what a token counts, and which rows make a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

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
from harness1.rl.groups import EpisodeGroup, Kind, advantages, batch_metrics, has_signal, substeps, training_rows
from harness1.rows import TrainRow
from harness1.training.log import episode_metrics
from tests.policy.test_language_model import NONSENSE, episode_of, sayer
from tests.support import call, curate, search

OUTPUT = 4  # tokens that a made turn says


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
    return EpisodeGroup(index, episodes)


def values_of(rows: Sequence[TrainRow]) -> dict[str, list[float]]:
    """The advantages of the rows of each episode: trained tokens of a row all have the same, and others have none."""
    found: dict[str, list[float]] = {}
    for row in rows:
        assert row.advantages is not None
        value = max(row.advantages, key=abs)
        assert row.advantages == tuple(value * mask for mask in row.loss_mask)
        found.setdefault(row.episode_id, []).append(value)
    return found


def test_every_turn_of_an_episode_has_the_advantage_of_the_episode() -> None:
    rows = training_rows([group(5, made_episode("a", 2, 3.0), made_episode("b", 1, 1.0))], Rl())
    assert (values_of(rows), {row.group_id for row in rows}) == ({"a": [1.0, 1.0], "b": [-1.0]}, {"5"})
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
    held = [[name for name, _ in groupby(step, key=lambda row: row.group_id)] for step in steps]
    assert all(len(names) == len(set(names)) for names in held)
    assert sum(map(len, held)) == groups
    assert max(map(len, held)) - min(map(len, held)) <= 1


def siblings(order: str) -> EpisodeGroup:
    """Two search for rivers first, and one of them says nonsense in between. A third finds nothing, then fails."""
    said: list[tuple[str, float, tuple[ToolCall | str, ...]]] = [
        ("a", 2.0, (search("river"), NONSENSE, search("war"), curate(add_ids=["D1"]))),
        ("b", 0.5, (search("river"), search("town"), call("end_search"))),
        ("c", -0.5, (search("nowhere"), *[NONSENSE] * 4)),
    ]
    made = (replace(episode_of(sayer(*acts), order), episode_id=name, reward=RewardRecord(r)) for name, r, acts in said)
    return group(3, *made)


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [([], False), ([1.0], False), ([1.0, 1.0 + 1e-12], False), ([0.1 + 0.2, 0.3], False), ([1.0, 1.001], True)],
)
def test_equal_rewards_are_no_signal(rewards: list[float], signal: bool) -> None:
    assert has_signal(rewards) is signal


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("center", [-2.0, -1.0, 3.0]),
        ("leave_one_out", [1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2]),
        ("group_std", [value / (7**0.5 + 1e-4) for value in (-2, -1, 3)]),  # (4 + 1 + 9) / 2
        ("batch_std", [value / ((14 / 5) ** 0.5 + 1e-4) for value in (-2, -1, 3)]),  # over all six
    ],
)
def test_advantages_by_hand(kind: Kind, expected: list[float]) -> None:
    """How hard a task is changes nothing."""
    for ease in (0.0, 100.0):
        found = advantages([[1.0 + ease, 2.0 + ease, 6.0 + ease], [0.5, 0.5], [4.0], []], kind)
        assert found[0] == pytest.approx(expected)
        assert found[1:] == [[0.0, 0.0], [0.0], []]


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
    """The terms add up to the reward, with overrides in their place."""
    assert episode_metrics([GOOD, LOST, BROKEN], lambda _: GOLD) == {
        "reward": 0.5,
        "curated_recall": 0.25,
        "precision": 0.25,
        "set_size": 1.0,
        "turns": 2.0,
        "term/outcome": 0.5,
        "term/answer": 0.25,
        "term/format_failure": -0.25,
        "tool_errors": 0.0,
        "format_failures": 0.5,
        "ended": 0.5,
        "output_tokens": 0.0,
        "tool/search_corpus": 0.75,
        "tool/curate": 0.25,
    }
    assert episode_metrics([BROKEN], lambda _: GOLD) == {}


def test_a_group_is_as_old_as_its_oldest_call() -> None:
    newer = msgspec.structs.replace(LOST, policy_versions=(6, 6))
    groups = [group(0, GOOD, LOST), group(1, newer, newer)]
    found = batch_metrics(groups, 7, lambda _: GOLD)
    assert (found["staleness"], found["staleness_max"]) == (2.5, 4.0)
    assert found["reward_std"] == pytest.approx(0.5)
