"""Queries that ask the same are recognised, exactly and nearly."""

from __future__ import annotations

import random

import numpy as np
import pytest
from datasketch import MinHash

from harness1.data.leaks import PERMUTATIONS, KnownQueries, normalised
from harness1.memory.dedup import signature
from tests.support import similarity

WORDS = [f"word{number}" for number in range(400)]


def overlapping(rng: random.Random, share: float) -> tuple[list[str], list[str]]:
    """Two sets of words with about this Jaccard similarity."""
    words = rng.sample(WORDS, 60)
    both = round(share * 60)
    rest = (60 - both) // 2
    return words[: both + rest], words[:both] + words[both + rest :]


def test_normalising_leaves_the_words() -> None:
    assert normalised("  Who wrote “Ulysses”, in\t１９２２? ") == "who wrote ulysses in 1922"
    assert normalised("STRASSE") == normalised("straße")


def test_equal_words_are_the_same_whatever_the_threshold() -> None:
    known = KnownQueries(1.0, [("a", "Who wrote Ulysses?")])
    assert known.match("who wrote ulysses") == "a"
    assert known.match("Who wrote Dubliners?") is None


def test_nearly_equal_words_are_the_same() -> None:
    query = "In which year did the engineer who designed the bridge over the river found a company in the old town"
    known = KnownQueries(0.8, [("a", query)])
    assert known.match(query.replace("old", "new")) == "a"
    assert known.match(query.replace("engineer who designed the bridge", "painter who sold a house")) is None


def test_the_most_similar_query_is_named() -> None:
    words = [f"w{number}" for number in range(30)]
    known = KnownQueries(0.5, [("far", " ".join([*words[:24], "x"])), ("near", " ".join([*words[:29], "x"]))])
    assert known.match(" ".join(words)) == "near"


def test_the_estimate_is_that_of_minhash() -> None:
    """Against the true similarity and against `datasketch`: four standard errors of each."""
    rng = random.Random(0)
    for share in (0.3, 0.6, 0.8, 0.95):
        one, other = overlapping(rng, share)
        true = len(set(one) & set(other)) / len(set(one) | set(other))
        ours = similarity(*(signature(" ".join(words), PERMUTATIONS, shingle=1) for words in (one, other)))
        sketches = [MinHash(num_perm=PERMUTATIONS) for _ in range(2)]
        for sketch, words in zip(sketches, (one, other), strict=True):
            sketch.update_batch([word.encode() for word in words])
        error = np.sqrt(true * (1 - true) / PERMUTATIONS)
        assert abs(ours - true) < 4 * error
        assert abs(ours - sketches[0].jaccard(sketches[1])) < 8 * error


def test_many_queries_are_kept_apart() -> None:
    rng = random.Random(1)
    queries = [(str(number), " ".join(rng.sample(WORDS, 12))) for number in range(300)]
    known = KnownQueries(0.8, queries)
    assert [known.match(query) for _, query in queries] == [name for name, _ in queries]
    assert [known.match(query + " more") for _, query in queries[::50]] == [name for name, _ in queries[::50]]


@pytest.mark.parametrize("near", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_the_match_is_that_of_a_comparison_of_all_hashes(near: float) -> None:
    rng = random.Random(2)
    pairs = [overlapping(rng, rng.random()) for _ in range(200)]
    known = KnownQueries(near, [(str(at), " ".join(one)) for at, (one, _) in enumerate(pairs)])
    table = np.array([np.frombuffer(signature(" ".join(one), PERMUTATIONS, shingle=1), "<u4") for one, _ in pairs])
    for _, other in pairs:
        asked = np.frombuffer(signature(" ".join(other), PERMUTATIONS, shingle=1), "<u4")
        similar = (table == asked).mean(axis=1)
        expected = str(similar.argmax()) if similar.max() >= near else None
        assert known.match(" ".join(other)) == expected


def test_a_query_without_words_matches_only_another() -> None:
    known = KnownQueries(0.5, [("a", "Who?")])
    assert known.match("?!") is None
    known.add("empty", "...")
    assert known.match("?!") == "empty"
    assert known.match("Who?") == "a"
