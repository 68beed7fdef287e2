"""Answers are scored as SQuAD does it: by hand-computed values, and equal to the official rules on plain ASCII."""

from __future__ import annotations

import re
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.eval.answer_run import exact_match, normalise, token_f1

WORDS = st.lists(
    st.sampled_from(["The", "a", "An", "Ada", "ada.", "1815", "U.S.", "of", "--", "an,", "Theft"]), max_size=6
)
TEXTS = WORDS.map(" ".join)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Analytical\tEngine.", "analytical engine"),
        ("an apple, a day", "apple day"),
        ("Theft, Anna & Aaron", "theft anna aaron"),
        ("1990-1994", "19901994"),
        ("1990–1994", "19901994"),
        ("“Ada’s”", "adas"),
        ("Cafe\u0301 MÜNCHEN", "café münchen"),
        ("東京。", "東京"),
        ("$5 + 3", "5 3"),
        ("the", ""),
        ("", ""),
    ],
)
def test_case_articles_punctuation_and_white_space_make_no_difference(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answer", "golds", "match", "f1"),
    [
        ("Missolonghi", ["Missolonghi"], 1.0, 1.0),
        ("the town of Missolonghi.", ["Missolonghi"], 0.0, 0.5),
        ("in Missolonghi", ["Greece", "Missolonghi"], 0.0, 2 / 3),
        ("Lord Byron", ["George Byron", "Lord Byron"], 1.0, 1.0),
        ("new york new york", ["new york"], 0.0, 2 / 3),
        ("", ["Ada"], 0.0, 0.0),
        ("", ["The"], 1.0, 1.0),
        ("Paris", ["Rome"], 0.0, 0.0),
        ("cafe\u0301", ["CAFÉ"], 1.0, 1.0),
    ],
)
def test_the_best_of_the_right_answers_counts(answer: str, golds: list[str], match: float, f1: float) -> None:
    assert exact_match(answer, golds) == match
    assert token_f1(answer, golds) == pytest.approx(f1)


def official_normal(text: str) -> str:
    """The published rules, for ASCII."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


@given(TEXTS, TEXTS)
def test_scores_of_plain_texts_are_the_published_ones(answer: str, gold: str) -> None:
    said, right = official_normal(answer).split(), official_normal(gold).split()
    assert exact_match(answer, [gold]) == float(said == right)
    same = sum((Counter(said) & Counter(right)).values())
    if not said or not right:
        assert token_f1(answer, [gold]) == float(said == right)
    elif same == 0:
        assert token_f1(answer, [gold]) == 0.0
    else:
        precision, recall = same / len(said), same / len(right)
        assert token_f1(answer, [gold]) == pytest.approx(2 * precision * recall / (precision + recall))


def test_an_answer_is_never_scored_against_nothing() -> None:
    with pytest.raises(ValueError, match="empty"):
        exact_match("Ada", [])
