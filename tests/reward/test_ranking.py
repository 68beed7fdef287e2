"""Measures of rankings: by hand where targets are facts, and equal to `pytrec_eval` where they are documents."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import ir_measures
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from harness1.reward.measures import DEPTHS, MEASURES, Wanted, grade_units, match_targets, measures

UNITS = st.sampled_from([f"d{number}" for number in range(14)])
RANKINGS = st.lists(UNITS, max_size=40)
GRADES = st.dictionaries(UNITS, st.integers(-1, 4), min_size=1)
TARGETS = st.lists(st.frozensets(UNITS, min_size=1, max_size=3), min_size=1, max_size=6)
TREC = {f"{theirs}_{depth}": f"{ours}@{depth}" for depth in DEPTHS
        for theirs, ours in (("recall", "R"), ("P", "P"), ("success", "Success"))} | {
    "ndcg_cut_10": "nDCG@10", "map": "AP", "recip_rank": "RR",
}  # fmt: skip
"""Our names of measures by those of `trec_eval`."""


def wanted(*targets: str) -> Wanted:
    """Facts, each as the letters of the chunks that state it."""
    return Wanted(tuple(frozenset(target) for target in targets), (1,) * len(targets))


def found(ranked: Any, goal: Wanted) -> dict[str, float]:
    return measures(match_targets(ranked, goal))


@given(RANKINGS, GRADES)
def test_every_measure_of_documents_is_that_of_trec_eval(ranked: Any, grades: Any) -> None:
    once = list(dict.fromkeys(ranked))
    names = {name.rpartition("_")[0] + "." + name.rpartition("_")[2] if name[-1].isdigit() else name for name in TREC}
    scores = {unit: float(-place) for place, unit in enumerate(once)}
    judged = pytrec_eval.RelevanceEvaluator({"q": grades}, names).evaluate({"q": scores})
    theirs = judged.get("q", dict.fromkeys(TREC, 0.0))
    ours = found(ranked, grade_units(grades))
    assert ours.keys() == set(TREC.values())
    assert ours == pytest.approx({TREC[name]: theirs[name] for name in TREC}, abs=1e-9, rel=0)


def test_measures_are_spelled_as_ir_measures_does() -> None:
    assert {str(ir_measures.parse_measure(name)) for name in TREC.values()} == set(TREC.values())


@given(RANKINGS, TARGETS)
def test_measures_of_facts_are_shares_and_a_repeated_chunk_changes_nothing(ranked: Any, targets: Any) -> None:
    goal = Wanted(tuple(targets), (1,) * len(targets))
    judged = match_targets(ranked, goal)
    assert all(0.0 <= value <= 1.0 for value in [*measures(judged).values(), judged.recall(), judged.precision()])
    assert match_targets([*ranked, *ranked], goal) == judged


@given(st.lists(st.frozensets(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=5))
def test_some_order_of_the_chunks_is_ideal_and_none_is_better(targets: Any) -> None:
    goal = Wanted(tuple(targets), (1,) * len(targets))
    assert max(match_targets(order, goal).ndcg(10) for order in permutations("abcd")) == 1.0


def test_a_fact_is_met_at_its_best_placed_chunk_and_only_once() -> None:
    ours = found("xabxc", wanted("ab", "c", "z"))
    assert (ours["R@1"], ours["R@3"], ours["R@5"]) == (0.0, 1 / 3, 2 / 3)
    assert (ours["P@3"], ours["P@5"], ours["P@10"]) == (2 / 3, 3 / 5, 3 / 10)


def test_facts_by_hand() -> None:
    # Distinct places: x 1, a 2, b 3, c 4; the facts ab at 2 and c at 4, z never.
    ours = found("xabxc", wanted("ab", "c", "z"))
    assert ours["RR"] == 1 / 2
    assert ours["AP"] == pytest.approx((1 / 2 + 3 / 4) / 3)
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert ours["nDCG@10"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(5)) / ideal)
    assert (ours["Success@1"], ours["Success@3"]) == (0.0, 1.0)


def test_one_chunk_that_states_all_facts_is_a_perfect_ranking() -> None:
    ours = found("b", wanted("ab", "bc"))
    assert (ours["nDCG@10"], ours["AP"], ours["R@1"]) == (1.0, 1.0, 1.0)
    later = found("ac", wanted("ab", "bc"))
    assert later["nDCG@10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)


def test_a_ranking_better_than_the_greedy_ideal_is_no_more_than_perfect() -> None:
    # The greedy ideal begins with a, which states two facts, and then needs both others.
    goal = wanted("b", "ab", "ac", "c")
    assert match_targets([], goal).ideal == (2, 1, 1)
    assert found("bc", goal)["nDCG@10"] == 1.0


def test_nothing_ranked_and_nothing_wanted_are_0() -> None:
    for judged in (
        match_targets([], grade_units({"a": 1})),
        match_targets(["a"], grade_units({"a": 0})),
        match_targets([], grade_units({})),
    ):
        assert set(measures(judged).values()) == {0.0}
        assert (judged.recall(), judged.precision()) == (0.0, 0.0)
    assert set(found(["a"], grade_units({}))) == MEASURES.keys()
