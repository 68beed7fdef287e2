from __future__ import annotations

import math

import msgspec
import pytest

from harness1.config import Env, load_config
from harness1.errors import UsageError
from harness1.eval.metrics import METRICS, measure, metric_names, rerank_recall
from harness1.records import (
    Curated,
    Delta,
    Episode,
    Gold,
    Hashes,
    Hit,
    Note,
    Observation,
    Ranking,
    RewardRecord,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
)
from harness1.reward.measures import measure_outcome

SEARCH, GREP, END = ToolCall("search_corpus"), ToolCall("grep_corpus"), ToolCall("end_search")
EPISODE = Episode(
    episode_id="e",
    task=Task("t", "query"),
    stop_reason=StopReason.END_SEARCH,
    status=Status.COMPLETED,
    hashes=Hashes("", "", ""),
    turns=(
        Turn(0, action=SEARCH, observation=Observation("search_corpus", delta=Delta(auto_populated=("x", "a", "y")))),
        Turn(1, action=SEARCH, observation=Observation("search_corpus")),
        Turn(2, action=GREP, observation=Observation("grep_corpus", error=Note("bad_pattern"))),
        Turn(3, action=END, observation=Observation("end_search")),
        Turn(4, parse_error="no call"),
    ),
    curated=(Curated("x", "high", 1), Curated("a", "fair", 2), Curated("z", "low", 3)),
    pool=("x", "a", "z", "y"),
    aliases={"b": "x"},
    reward=RewardRecord(0.75),
)
GOLD = Gold(relevant={"a": 1, "b": 1, "c": 1}, answer_docs=("b",))


def test_every_metric_by_hand() -> None:
    expected = {
        "curated_recall": 1 / 3,
        "curated_precision": 1 / 3,
        "curated_f1": 1 / 3,
        "curated_f2": 1 / 3,
        "curated_recall_alias": 2 / 3,
        "curated_precision_alias": 2 / 3,
        "answer_recall": 0.0,
        "answer_recall_alias": 1.0,
        "trajectory_recall": 2 / 3,
        "trajectory_answer_recall": 1.0,
        "selection_loss": 1 / 3,
        "R@1": 0.0,
        "R@3": 1 / 3,
        "R@5": 1 / 3,
        "R@10": 1 / 3,
        "R@15": 1 / 3,
        "R@30": 1 / 3,
        "P@1": 0.0,
        "P@3": 1 / 3,
        "P@5": 1 / 5,
        "P@10": 1 / 10,
        "P@15": 1 / 15,
        "P@30": 1 / 30,
        "Success@1": 0.0,
        "Success@3": 1.0,
        "Success@5": 1.0,
        "Success@10": 1.0,
        "Success@15": 1.0,
        "Success@30": 1.0,
        "nDCG@10": (1 / math.log2(3)) / (1 + 1 / math.log2(3) + 1 / 2),
        "AP": (1 / 2) / 3,
        "RR": 1 / 2,
        "set_size": 3.0,
        "turns": 4.0,
        "reward": 0.75,
        "duplicates_hidden": 1.0,
        "auto_populated_kept": 2.0,
        "tool_errors": 1.0,
        "format_errors": 1.0,
        "tool_search_corpus": 2.0,
    }
    assert measure(measure_outcome(EPISODE, GOLD), EPISODE, Env()) == pytest.approx(expected)
    assert METRICS.keys() == expected.keys() - {"tool_search_corpus"}


def test_a_mechanism_that_is_off_has_no_metric() -> None:
    env = load_config(overrides=["env.dedup.on=false", "env.auto_populate.on=false"]).env
    assert set(metric_names(Env())) - set(metric_names(env)) == {"duplicates_hidden", "auto_populated_kept"}
    assert "duplicates_hidden" not in measure(measure_outcome(EPISODE, GOLD), EPISODE, env)


def test_an_unscored_episode_has_no_reward_to_report() -> None:
    unscored = msgspec.structs.replace(EPISODE, reward=None)
    with pytest.raises(UsageError, match="'e' has no reward"):
        measure(measure_outcome(unscored, GOLD), unscored, Env())


def searched(*rankings: Ranking, unit: str = "document", hits: tuple[Hit, ...] = ()) -> Episode:
    """An episode with one search for each ranking."""
    turns = tuple(
        Turn(at, action=SEARCH, observation=Observation("search_corpus", hits=hits, rankings=(ranking,)))
        for at, ranking in enumerate(rankings)
    )
    return msgspec.structs.replace(EPISODE, turns=turns, unit=unit)


def test_rerank_recall_is_the_share_of_the_gold_given_to_the_reranker_that_it_handed_on() -> None:
    first = Ranking("q", ("x", "a"), pre_rerank_ids=("b", "x", "a", "y"))
    assert rerank_recall(searched(first), GOLD) == 0.5
    later = Ranking("q", ("b",), pre_rerank_ids=("b", "z"))
    assert rerank_recall(searched(first, later), GOLD) == 1.0
    assert measure(measure_outcome(EPISODE, GOLD), searched(first), Env(), GOLD)["rerank_recall"] == 0.5


def test_rerank_recall_counts_documents_by_their_chunks_and_facts_by_theirs() -> None:
    given = Ranking("q", ("x", "a#0"), pre_rerank_ids=("b#2", "x", "a#0", "c-7"))
    assert rerank_recall(searched(given), GOLD) == 0.5
    hits = (Hit("c-7", "c", 7, "", "", 1.0, 0, 0),)
    assert rerank_recall(searched(given, hits=hits), GOLD) == pytest.approx(1 / 3)
    facts = Gold(relevant={"a": 1}, facts=(("a#0", "a#1"), ("b#2",), ("z",)))
    assert rerank_recall(searched(given, unit="chunk"), facts) == 0.5


def test_without_a_reranker_or_gold_before_it_there_is_no_rerank_recall() -> None:
    assert rerank_recall(searched(Ranking("q", ("a",))), GOLD) is None
    assert rerank_recall(searched(Ranking("q", ("x",), pre_rerank_ids=("x", "y"))), GOLD) is None
    assert "rerank_recall" not in measure(measure_outcome(EPISODE, GOLD), EPISODE, Env(), GOLD)
