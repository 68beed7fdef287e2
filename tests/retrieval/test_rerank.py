"""Reranking orders what it reads, and leaves the rest where it stands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from harness1.records import Chunk
from harness1.retrieval.cross_encoder import rerank
from harness1.retrieval.protocol import Scored, total_order
from tests.support import chunk

CHUNKS = [chunk(name, f"text {name}", f"Title {name}") for name in "edcba"]


class Scores:
    """Gives probabilities by the last letter of a text, and remembers what it read in each call."""

    hash = "scores"

    def __init__(self, **scores: float) -> None:
        self.scores = scores
        self.calls: list[list[tuple[str, str]]] = []

    def score(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        self.calls.append(list(pairs))
        return np.array([self.scores[text[-1]] for _, text in pairs], dtype=np.float32)


def order(scorer: Scores, candidates: int, chunks: Sequence[Chunk] = CHUNKS) -> list[str]:
    return names(rerank(["query"], [chunks], scorer, candidates)[0])


def names(ranked: Sequence[Scored]) -> list[str]:
    return [hit.chunk.chunk_id[0] for hit in ranked]


def test_the_best_probability_comes_first_and_equal_ones_go_by_id() -> None:
    assert order(Scores(a=0.2, b=0.9, c=0.2, d=0.5, e=0.1), 9) == ["b", "d", "a", "c", "e"]


def test_the_model_reads_title_and_text_of_the_candidates_alone() -> None:
    scorer = Scores(e=0.1, d=0.2)
    assert order(scorer, 2) == ["d", "e", "c", "b", "a"]
    assert scorer.calls == [[("query", "Title e\ntext e"), ("query", "Title d\ntext d")]]


def test_several_rankings_are_read_in_one_call_and_equal_pairs_once() -> None:
    scorer = Scores(a=0.5, b=0.9, c=0.2, d=0.6, e=0.1)
    rankings = [CHUNKS[:3], [], CHUNKS[:3], CHUNKS[2:0:-1], CHUNKS[3:]]
    found = rerank(["one", "two", "two", "one", "two"], rankings, scorer, 2)
    assert [names(ranked) for ranked in found] == [["d", "e", "c"], [], ["d", "e", "c"], ["d", "c"], ["b", "a"]]
    (pairs,) = scorer.calls
    assert [(query, text[-1]) for query, text in pairs] == [
        ("one", "e"), ("one", "d"), ("two", "e"), ("two", "d"), ("one", "c"), ("two", "b"), ("two", "a"),
    ]  # fmt: skip


@pytest.mark.parametrize("low", [0.0, 1e-38, 0.4, 1.0])
@pytest.mark.parametrize("candidates", [1, 2, 4, 5])
def test_the_scores_say_the_order(low: float, candidates: int) -> None:
    (ranked,) = rerank(["query"], [CHUNKS], Scores(a=low, b=low, c=0.5, d=low, e=1.0), candidates)
    found = [(hit.chunk.chunk_id, hit.score) for hit in ranked]
    assert np.isfinite([score for _, score in found]).all()
    assert total_order(found[::-1]) == found
    assert len({chunk_id for chunk_id, _ in found}) == 5


def test_what_is_nearly_certain_or_nearly_excluded_is_still_told_apart() -> None:
    assert order(Scores(e=3e-5, d=1e-5, c=0.99999, b=0.99997, a=0.5), 5) == ["c", "b", "a", "e", "d"]


def test_nothing_to_rerank_is_nothing_read() -> None:
    scorer = Scores()
    assert rerank(["one", "two"], [[], []], scorer, 5) == [[], []]
    assert rerank([], [], scorer, 5) == []
    assert scorer.calls == []
