"""The passages of a document in the order in which they matter to a question."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness1.memory.question import by_relevance
from tests.support import WORDS

TEXTS = (
    "Rain fell for days.",
    "The king built a castle.",
    "Castles were built by kings in Rome.",
    "More rain.",
    "Snow.",
    "Wind.",
)


def test_the_rarer_and_the_more_words_of_the_question_the_earlier_in_any_inflection() -> None:
    assert by_relevance(TEXTS, "Which kings built castles in Rome?") == [2, 1, 0, 3, 4, 5]


def test_function_words_do_not_count() -> None:
    assert by_relevance(("Of which and the.", "Snow.", "Wind.", "A castle."), "Which of the castle?") == [3, 0, 1, 2]


def test_a_question_without_a_match_leaves_the_order() -> None:
    assert by_relevance(TEXTS, "zebra") == [0, 1, 2, 3, 4, 5]
    assert by_relevance(("", ""), "") == [0, 1]


texts = st.lists(st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join), max_size=9)


@given(texts, st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join))
def test_each_passage_comes_once(drawn: list[str], question: str) -> None:
    assert sorted(by_relevance(drawn, question)) == list(range(len(drawn)))
