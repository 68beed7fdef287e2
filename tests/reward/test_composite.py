from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Config, Reward, load_config
from harness1.errors import UsageError
from harness1.records import STATUS_OF, Curated, Episode, Gold, Hashes, RewardRecord, StopReason, Task
from harness1.reward import COMPONENTS, composite, score
from harness1.reward.measures import Outcome

SHAPELESS = load_config(overrides=["reward.diversity=0.0", "reward.turn_penalty=0.0"])
GOLD = Gold(relevant={"a": 1, "b": 1}, answer_docs=("a",))
SHARE = st.floats(0.0, 1.0)


def finished(stop: StopReason = StopReason.END_SEARCH, curated: str = "", pool: str = "") -> Episode:
    return Episode(
        episode_id="e",
        task=Task("t", "query"),
        stop_reason=stop,
        status=STATUS_OF[stop],
        hashes=Hashes("env", "policy", "index"),
        curated=tuple(Curated(unit, "fair", rank) for rank, unit in enumerate(curated, 1)),
        pool=tuple(pool),
    )


def rewarded(episode: Episode, config: Config = SHAPELESS) -> RewardRecord:
    reward = score(episode, GOLD, config).reward
    assert reward is not None
    return reward


def test_a_perfect_episode_without_shaping_earns_3_2() -> None:
    assert rewarded(finished(curated="ab", pool="ab")).total == pytest.approx(3.2)


def test_all_seen_and_nothing_right_delivered_earns_0_35() -> None:
    assert rewarded(finished(curated="x", pool="xab")).total == pytest.approx(0.35)


def test_a_worthless_set_earns_the_floor() -> None:
    found = rewarded(finished(curated="x", pool="x"))
    assert (found.total, found.override) == (0.001, None)


def test_an_empty_set_overrides_everything() -> None:
    found = rewarded(finished(pool="ab"))
    assert (found.total, found.override) == (-0.2, "empty")


def test_a_format_failure_overrides_whatever_was_curated() -> None:
    found = rewarded(finished(StopReason.FORMAT_LIMIT, "ab", "ab"))
    assert (found.total, found.override) == (-0.5, "format_failure")


def test_an_infrastructure_fault_is_never_rewarded() -> None:
    assert score(finished(StopReason.FAULT, "ab", "ab"), GOLD, SHAPELESS).reward is None
    assert score(finished(StopReason.FAULT), GOLD, SHAPELESS).reward is None


def test_a_middling_episode_by_hand() -> None:
    # P = 1/2, R = 1/2, F = 1, T = 1, TF = 1; one of six tools; 30 turns are half of the penalised ones.
    outcome = Outcome(
        precision=0.5,
        recall=0.5,
        answer_recall=1.0,
        trajectory_recall=1.0,
        trajectory_answer_recall=1.0,
        set_size=2,
        turns=30,
        calls={"search_corpus": 30},
    )
    expected = 0.7 * 0.5 + 0.3 + 1.0 + 0.8 + 0.4 + 0.15 / 6 - 0.02 * 0.5
    found = composite(outcome, finished(), Config())
    assert found is not None
    assert found.total == pytest.approx(expected)
    assert found.total == pytest.approx(sum(term.value * term.weight for term in found.terms.values()))


def test_terms_without_weight_are_not_recorded() -> None:
    published = {"outcome", "trajectory", "answer_found", "answer", "trajectory_answer", "answer_missed"}
    assert rewarded(finished(curated="a", pool="a")).terms.keys() == published
    assert rewarded(finished(curated="a", pool="a"), Config()).terms.keys() == published | {"diversity", "turn_penalty"}


def test_scoring_names_the_weights_and_changes_nothing_else() -> None:
    episode = finished(curated="ab", pool="ab")
    scored = score(episode, GOLD, SHAPELESS)
    assert scored.hashes == Hashes("env", "policy", "index", reward=SHAPELESS.reward_hash)
    assert msgspec.structs.replace(scored, reward=None, hashes=episode.hashes) == episode
    assert score(scored, GOLD, SHAPELESS) == scored


def test_gold_that_cannot_be_scored_is_refused() -> None:
    with pytest.raises(UsageError, match="'t'"):
        score(finished(curated="a"), Gold(relevant={}), SHAPELESS)


OUTCOMES = st.fixed_dictionaries(
    dict.fromkeys(("precision", "recall", "answer_recall", "trajectory_recall", "trajectory_answer_recall"), SHARE)
    | {"set_size": st.integers(0, 30), "turns": st.integers(0, 60)}
    | {"calls": st.dictionaries(st.sampled_from(["search_corpus", "curate", "verify"]), st.integers(1, 9))}
)


@given(OUTCOMES, SHARE, st.sampled_from(["recall", "answer_recall", "trajectory_recall", "trajectory_answer_recall"]))
def test_more_recall_of_any_kind_never_costs(outcome: dict[str, Any], other: float, name: str) -> None:
    config = load_config(overrides=["reward.recall_gap=0.2"])
    low, high = sorted((outcome[name], other))
    less, more = (composite(Outcome(**(outcome | {name: share})), finished(), config) for share in (low, high))
    assert less is not None
    assert more is not None
    assert more.total >= less.total - 1e-12


def test_the_defaults_are_the_published_weights() -> None:
    weights = {part.name: part.weight(Reward()) for part in COMPONENTS if part.weight(Reward())}
    assert weights == {
        "outcome": 0.7,
        "trajectory": 0.3,
        "answer_found": 1.0,
        "answer": 0.8,
        "trajectory_answer": 0.4,
        "answer_missed": -0.35,
        "diversity": 0.15,
        "turn_penalty": -0.02,
    }
