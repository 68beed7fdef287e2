"""Near duplicates are found by similarity, and kept apart by a changed number, date, negation or title."""

from __future__ import annotations

import hashlib
import random

import pytest
from datasketch import MinHash

from harness1.memory.dedup import THRESHOLD, Fingerprints, guard, signature
from tests.support import similarity

PLAIN = "the quick brown fox jumps over a lazy dog while several grey cats watch from behind the old garden wall today"


def _pair(rng: random.Random, jaccard: float, length: int = 400) -> tuple[str, str]:
    """Two texts whose one-token shingle sets have about the given Jaccard similarity."""
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=12)) for _ in range(2 * length)]
    changed = round(length * (1 - jaccard) / (1 + jaccard))
    return " ".join(words[:length]), " ".join(words[changed : length + changed])


def shingles(text: str, size: int) -> set[str]:
    tokens = text.split()
    return {" ".join(tokens[start : start + size]) for start in range(len(tokens) - size + 1)}


def test_the_estimate_is_as_good_as_that_of_datasketch() -> None:
    rng = random.Random(5)
    ours, theirs = [], []
    for step in range(60):
        size = 1 + 4 * (step % 2)
        texts = _pair(rng, 0.70 + 0.25 * step / 60)
        one, other = (shingles(text, size) for text in texts)
        hashes = MinHash(64), MinHash(64)
        for made, parts in zip(hashes, (one, other), strict=True):
            made.update_batch([shingle.encode() for shingle in parts])
        exact = len(one & other) / len(one | other)
        ours.append(similarity(*(signature(text, 64, size) for text in texts)) - exact)
        theirs.append(float(hashes[0].jaccard(hashes[1])) - exact)
    assert max(map(abs, ours)) <= 0.15
    assert abs(sum(ours)) / 60 < 0.02
    assert sum(map(abs, ours)) < 1.25 * sum(map(abs, theirs))


def test_every_pair_at_the_threshold_is_found() -> None:
    rng = random.Random(6)
    for step in range(60):
        a, b = _pair(rng, 0.80 + 0.2 * step / 60)
        seen = Fingerprints()
        seen.add("a", "t", a)
        estimate = similarity(signature(a, 64, 5), signature(b, 64, 5))
        assert (seen.match("b", "t", b) == "a") == (estimate >= THRESHOLD)


def test_a_signature_is_of_runs_of_lower_case_letters_and_digits_and_the_same_on_every_machine() -> None:
    assert hashlib.sha256(signature(PLAIN, 64, 5)).hexdigest().startswith("dd9e3e0caf70ed42")
    assert signature("A b-c D", 64, 2) == signature("a B c d", 64, 2) != signature("a b d c", 64, 2)
    assert signature("Один Два", 64, 5) == signature("два один", 64, 5) != signature("Один Три", 64, 5)
    assert signature("!?", 64, 5) == signature("", 64, 5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("it rose 5 points", "it rose 6 points"),
        ("it rose 5.1 points", "it rose 5.2 points"),
        ("it rose 5% a year", "it rose 5 a year"),
        ("it rose $5 a year", "it rose €5 a year"),
        ("it was -5 today", "it was 5 today"),
        ("5 million", "5 billion"),
        ("the 1st of them", "the 2nd of them"),
        ("the first of them", "the second of them"),
        ("on 12 March 2020", "on 12 April 2020"),
        ("March 12 and April 13", "March 13 and April 12"),
        ("it is so", "it is not so"),
        ("it did work", "it didn't work"),
        ("it didn’t work", "it did work"),
        ("with sugar", "without sugar"),
        ("either or", "neither nor"),
        ("1 and 1", "1 only"),
    ],
)
def test_a_changed_number_date_or_negation_says_other(one: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert guard("t", one) != guard("t", other)
    seen = Fingerprints()
    monkeypatch.setattr("harness1.memory.dedup.THRESHOLD", 0.0)
    monkeypatch.setattr("harness1.memory.dedup.LEAST_CHARACTERS", 0)
    seen.add("a", "t", one)
    assert seen.match("b", "t", other) is None


def test_the_most_similar_wins_then_the_earliest_and_short_or_tokenless_texts_match_nothing() -> None:
    seen = Fingerprints()
    near = PLAIN.replace("today", "yesterday")
    for name, text in (("near", near), ("first", PLAIN), ("second", PLAIN), ("short", "short"), ("none", "!" * 50)):
        seen.add(name, "t", text)
    assert seen.match("x", "t", PLAIN.upper()) == "first"
    assert seen.match("first", "t", PLAIN) == "second", "no text matches itself"
    assert guard("A  Title", "5 then 6, not 7") == guard("a title", "6 then 5; NOT 7!")
    assert seen.match("x", "other", PLAIN) is seen.match("x", "t", "short") is seen.match("x", "t", "!" * 50) is None


def test_hostile_text_takes_linear_time_and_raises_nothing() -> None:
    for text in ("a" * 10**6, "a " * 10**5, " " * 10**6, "1," * 10**5, "\ud800\x00" * 10**5, "$-" * 10**5):
        seen = Fingerprints()
        seen.add("a", text, text)
        assert seen.match("a", text, text) is None
        assert len(signature(text, 64, 5)) == 256
