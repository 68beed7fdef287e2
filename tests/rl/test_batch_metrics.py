"""What is watched of a batch of episodes."""

from __future__ import annotations

import msgspec
import pytest

from harness1.records import (
    Curated,
    DocId,
    Episode,
    Gold,
    Hashes,
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
from harness1.rl.rows import batch_metrics, episode_metrics

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
