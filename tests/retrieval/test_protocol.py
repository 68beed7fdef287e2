from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness1.records import ChunkId
from harness1.retrieval.protocol import best_first, rrf, total_order


def ids(*names: str) -> list[ChunkId]:
    return [ChunkId(name) for name in names]


def test_scores_within_a_ten_thousandth_of_the_top_are_ordered_by_id() -> None:
    scored = [(ChunkId("c"), 10.0), (ChunkId("a"), 9.9999), (ChunkId("b"), 9.99)]
    assert [name for name, _ in total_order(scored)] == ["a", "c", "b"]
    equal = [(ChunkId(name), 1.0) for name in "dbca"]
    assert [name for name, _ in total_order(equal, 2)] == ["a", "b"], "at the cut, too"


def test_negative_and_zero_scores_are_ordered_too() -> None:
    for high in (-1.0, 0.0):
        assert [name for name, _ in total_order([(ChunkId("a"), -2.0), (ChunkId("b"), high)])] == ["b", "a"]
    assert total_order([]) == []


# Few distinct values, some of them a fraction of a level apart, so that ties fall on the cut again and again.
SCORES = st.sampled_from([0.0, 1.0, 1.00002, 1.00007, 1.00012, 1.5, 0.3, 0.1, 0.05, 0.05001, 0.0500001, 2.0])


@given(st.lists(SCORES, max_size=60), st.integers(0, 70), st.randoms(use_true_random=False))
def test_the_vector_form_gives_the_same_order(values, k, random) -> None:
    scores = np.array(values, dtype=np.float32)
    names = ids(*(f"{number:03d}" for number in random.sample(range(len(values)), len(values))))
    ranks = np.array([int(name) for name in names], dtype=np.int32)
    expected = total_order(zip(names, scores.tolist(), strict=True), k)
    assert [names[at] for at in best_first(scores, ranks, k)] == [name for name, _ in expected]


def test_fusion_adds_reciprocal_ranks_and_nothing_for_a_missing_id() -> None:
    fused = dict(rrf([ids("a", "b"), ids("b")], k=60))
    assert fused == {"a": 1 / 61, "b": 1 / 62 + 1 / 61}
    assert [name for name, _ in rrf([ids("a", "b"), ids("b")])] == ["b", "a"]
    assert dict(rrf([ids("a", "a", "b")], k=1)) == {"a": 1 / 2, "b": 1 / 3}, "a repeated one counts once"


def test_fusion_breaks_ties_by_id_whatever_the_order_of_the_lists() -> None:
    rankings = [ids("b", "z"), ids("a", "z"), ids("c", "z")]
    for order in permutations(rankings):
        assert [name for name, _ in rrf(list(order))] == ["z", "a", "b", "c"]
