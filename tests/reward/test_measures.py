"""Measures of rankings: by hand where targets are facts, and equal to `pytrec_eval` where they are documents."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import ir_measures
import msgspec
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from harness1.errors import UsageError
from harness1.records import STATUS_OF, Curated, Episode, Gold, ModelCall, Note, Observation, StopReason, ToolCall, Turn
from harness1.reward.measures import (
    DEPTHS,
    MEASURES,
    Outcome,
    delivery,
    match_targets,
    measure_outcome,
    measures,
    targets,
)
from tests.support import ended_episode

GOLD = Gold(relevant={"a": 2, "b": 1, "c": 1, "d": 1, "junk": 0}, answer_docs=("a", "b"))
UNITS = st.sampled_from("abcdefgh")
SETS = st.lists(UNITS, unique=True)


def finished(curated: Any = "", pool: Any = "", stop: StopReason = StopReason.END_SEARCH, **more: Any) -> Episode:
    ranked = tuple(Curated(unit, "fair", rank) for rank, unit in enumerate(curated, 1))
    given = {"stop_reason": stop, "status": STATUS_OF[stop], "curated": ranked, "pool": tuple(pool)}
    return msgspec.structs.replace(ended_episode(), **(given | more))


def did(name: str, error: str | None = None) -> Turn:
    return Turn(0, action=ToolCall(name), observation=Observation(name, error=Note(error) if error else None))


def recalls(found: Outcome) -> list[float]:
    return [found.ranked[f"R@{depth}"] for depth in DEPTHS]


def test_documents_by_hand() -> None:
    # Delivered a, x, c, y; relevant a b c d; answer a b; seen a, b, c, x, y.
    found = measure_outcome(finished("axcy", "axcyb"), GOLD)
    assert (found.recall, found.precision, found.f1, found.answer_recall) == (2 / 4, 2 / 4, 0.5, 1 / 2)
    assert (found.trajectory_recall, found.trajectory_answer_recall, found.selection_loss) == (3 / 4, 1.0, 1 / 4)
    assert (recalls(found), found.set_size) == ([0.25, 0.5, 0.5, 0.5, 0.5, 0.5], 4)
    all_of_it = measure_outcome(finished("axcy", "axcyb"), Gold(relevant=dict.fromkeys("abcd", 1)))
    assert (all_of_it.answer_recall, all_of_it.trajectory_answer_recall) == (0.5, 0.75)
    best, worse = (measure_outcome(finished(order), GOLD).ranked["nDCG@10"] for order in ("abcd", "bacd"))
    assert 0.0 < worse < best == 1.0
    assert measure_outcome(finished(["junk"], ["junk"]), GOLD) == measure_outcome(finished("z", "z"), GOLD)


def test_a_fact_is_found_by_any_of_its_chunks_and_only_once() -> None:
    gold = Gold(relevant={}, facts=(("c1", "c2"), ("c3",), ("c4", "c5")), answer_facts=(1,))
    found = measure_outcome(finished(["c1", "c2", "x"], ["c1", "c2", "x", "c3"], unit="chunk"), gold)
    assert (found.recall, found.precision) == (1 / 3, 2 / 3)
    assert (found.answer_recall, found.trajectory_answer_recall) == (0.0, 1.0)
    assert (found.trajectory_recall, recalls(found)[0]) == (2 / 3, 1 / 3)
    every = msgspec.structs.replace(gold, answer_facts=())
    assert measure_outcome(finished(["c1"], unit="chunk"), every).answer_recall == 1 / 3


def test_a_hidden_duplicate_counts_as_seen_and_in_alias_variants_alone_as_curated() -> None:
    hiding = finished("xy", "xy", aliases={"a": "x", "b": "x", "c": "z"})
    found = measure_outcome(hiding, GOLD)
    assert found.trajectory_recall == 3 / 4
    assert (found.recall, found.precision, found.answer_recall) == (0.0, 0.0, 0.0)
    assert (found.recall_alias, found.precision_alias, found.answer_recall_alias) == (2 / 4, 1 / 2, 1.0)


def test_a_policy_error_delivers_nothing_but_keeps_what_it_saw() -> None:
    curated = (Curated("b", "low", 2), Curated("a", "high", 1), Curated("b", "fair", 3))
    assert delivery(msgspec.structs.replace(finished(), curated=curated)) == ("a", "b"), "without repeats"
    failed = measure_outcome(finished("abcd", "abcd", StopReason.FORMAT_LIMIT), GOLD)
    assert (failed.set_size, failed.trajectory_recall) == (0, 1.0)
    shares = (failed.recall, failed.precision, failed.f1, failed.f2, failed.answer_recall, failed.recall_alias)
    assert (shares, set(failed.ranked.values())) == ((0.0,) * 6, {0.0})
    assert measure_outcome(finished("abcd", "abcd", StopReason.CONTEXT_LIMIT), GOLD).recall == 1.0


def test_only_calls_that_succeeded_are_use_and_ending_is_never_counted() -> None:
    turns = (did("search"), did("curate"), did("search"), did("grep", error="bad_pattern"), did("end_search"))
    unreadable = Turn(5, parse_error="no call", calls=(ModelCall("1"), ModelCall("2", attempt=1)))
    retried = msgspec.structs.replace(did("search"), calls=(ModelCall("3"), ModelCall("4", attempt=1)))
    found = measure_outcome(finished("a", turns=(*turns, retried, unreadable)), GOLD)
    assert found.calls == {"search": 3, "curate": 1}
    assert (found.tools, found.tool_errors) == (2, 1)
    assert (found.turns, found.format_errors) == (6, 3)


@pytest.mark.parametrize(
    ("gold", "unit", "what"),
    [
        (None, "document", "no gold"),
        (Gold(relevant={}), "document", "no relevant"),
        (Gold(relevant={"a": 0}), "document", "no relevant"),
        (Gold(relevant={"a": 1}), "chunk", "no facts"),
        (Gold(relevant={"a": 1}, facts=((),)), "chunk", "no chunk"),
        (Gold(relevant={"a": 1}, facts=(("c",),), answer_facts=(1,)), "chunk", "beyond"),
    ],
)
def test_gold_with_nothing_to_find_is_refused_by_the_name_of_its_task(gold: Any, unit: Any, what: str) -> None:
    with pytest.raises(UsageError, match=f"'t1'.*{what}"):
        targets("t1", gold, unit)
    with pytest.raises(UsageError, match="'t'"):
        measure_outcome(finished("a", unit=unit), gold)


def shares(found: Outcome) -> list[float]:
    return [value for value in (*msgspec.structs.astuple(found), *found.ranked.values()) if isinstance(value, float)]


@given(SETS, SETS, st.dictionaries(st.sampled_from("pqab"), UNITS), st.sampled_from(StopReason))
def test_shares_are_shares_and_aliases_only_add(curated: Any, pool: Any, aliases: Any, stop: StopReason) -> None:
    found = measure_outcome(finished(curated, pool, stop, aliases=aliases), GOLD)
    assert all(0.0 <= share <= 1.0 for share in shares(found))
    assert found.recall_alias >= found.recall
    assert found.precision_alias >= found.precision
    assert (recalls(found), recalls(found)[-1]) == (sorted(recalls(found)), found.recall)
    assert found.ranked.keys() == MEASURES.keys()


UNITS_RANKING = st.sampled_from([f"d{number}" for number in range(14)])
RANKINGS = st.lists(UNITS_RANKING, max_size=40)
GRADES = st.dictionaries(UNITS_RANKING, st.integers(-1, 4), min_size=1)
TARGETS = st.lists(st.frozensets(UNITS_RANKING, min_size=1, max_size=3), min_size=1, max_size=6)
THEIRS = (("recall", "R"), ("P", "P"), ("success", "Success"))
TREC = {f"{theirs}_{depth}": f"{ours}@{depth}" for depth in DEPTHS for theirs, ours in THEIRS}
TREC |= {"ndcg_cut_10": "nDCG@10", "map": "AP", "recip_rank": "RR"}
"""Our names of measures by those of `trec_eval`."""


def found(ranked: Any, *facts: Any) -> dict[str, float]:
    """The measures of a ranking by facts, each as the chunks that state it."""
    return measures(match_targets(ranked, list(map(frozenset, facts)), [1] * len(facts)))


@given(RANKINGS, GRADES)
def test_every_measure_of_documents_is_that_of_trec_eval(ranked: Any, grades: Any) -> None:
    once = list(dict.fromkeys(ranked))
    names = {name.rpartition("_")[0] + "." + name.rpartition("_")[2] if name[-1].isdigit() else name for name in TREC}
    scores = {unit: float(-place) for place, unit in enumerate(once)}
    judged = pytrec_eval.RelevanceEvaluator({"q": grades}, names).evaluate({"q": scores})
    theirs = judged.get("q", dict.fromkeys(TREC, 0.0))
    relevant = {frozenset({unit}): grade for unit, grade in grades.items() if grade > 0}
    ours = measures(match_targets(ranked, [*relevant], [*relevant.values()]))
    assert ours.keys() == set(TREC.values())
    assert ours == pytest.approx({TREC[name]: theirs[name] for name in TREC}, abs=1e-9, rel=0)
    assert {str(ir_measures.parse_measure(name)) for name in TREC.values()} == set(TREC.values())


@given(RANKINGS, TARGETS)
def test_measures_of_facts_are_shares_and_a_repeated_chunk_changes_nothing(ranked: Any, targets: Any) -> None:
    judged = match_targets(ranked, targets, [1] * len(targets))
    assert all(0.0 <= value <= 1.0 for value in [*measures(judged).values(), judged.recall(), judged.precision()])
    assert match_targets([*ranked, *ranked], targets, [1] * len(targets)) == judged


@given(st.lists(st.frozensets(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=5))
def test_some_order_of_the_chunks_is_ideal_and_none_is_better(targets: Any) -> None:
    assert max(found(order, *targets)["nDCG@10"] for order in permutations("abcd")) == 1.0


def test_facts_by_hand() -> None:
    # Distinct places: x 1, a 2, b 3, c 4; the facts ab at 2 and c at 4, z never.
    ours = found("xabxc", "ab", "c", "z")
    assert [ours[f"R@{depth}"] for depth in (1, 3, 5)] == [0.0, 1 / 3, 2 / 3]
    assert [ours[f"P@{depth}"] for depth in (3, 5, 10)] == [2 / 3, 3 / 5, 3 / 10]
    assert (ours["RR"], ours["Success@1"], ours["Success@3"]) == (1 / 2, 0.0, 1.0)
    assert ours["AP"] == pytest.approx((1 / 2 + 3 / 4) / 3)
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert ours["nDCG@10"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(5)) / ideal)


def test_one_chunk_that_states_all_facts_is_a_perfect_ranking() -> None:
    ours = found("b", "ab", "bc")
    assert (ours["nDCG@10"], ours["AP"], ours["R@1"]) == (1.0, 1.0, 1.0)
    assert found("ac", "ab", "bc")["nDCG@10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
    # The greedy ideal begins with a, which states two facts, and then needs both others: a ranking may be better.
    goal = list(map(frozenset, ("b", "ab", "ac", "c")))
    assert match_targets([], goal, [1] * 4).ideal == (2, 1, 1)
    assert found("bc", *goal)["nDCG@10"] == 1.0


def test_nothing_ranked_and_nothing_wanted_are_0() -> None:
    for ranked, facts in (([], ["a"]), (["a"], []), ([], [])):
        assert found(ranked, *facts) == dict.fromkeys(MEASURES, 0.0)
        judged = match_targets(ranked, list(map(frozenset, facts)), [1] * len(facts))
        assert (judged.recall(), judged.precision()) == (0.0, 0.0)
