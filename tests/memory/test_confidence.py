"""How sure it is of a document: it grows with what the document has of the question, and means the same in any pool."""

from __future__ import annotations

import pytest

from harness1.episodes.rollout import rollout
from harness1.memory.confidence import CONVINCING, FITTED, HIGH, confidences, features, judge
from harness1.records import Task
from tests.support import CORPUS, Script, make_env, run, search

QUESTION = "Who was the father of Ada Lovelace, the author of the first program?"
FOUND = [(each.title, each.text) for each in CORPUS]


def sure(question: str, *documents: tuple[str, str]) -> list[float]:
    return confidences(question, documents)


def test_a_document_that_the_question_names_and_that_has_its_words_is_surer_than_any_other() -> None:
    first, *others = confidences(QUESTION, FOUND)
    assert first >= HIGH > max(others)
    assert min(others) < CONVINCING


def test_where_all_share_one_word_the_best_of_them_is_not_convincing() -> None:
    found = confidences("Which town won the national handball league for women in spring?", FOUND)
    assert max(found) < CONVINCING


@pytest.mark.parametrize(
    ("more", "less"),
    [
        (("", "The pump failed in March. Its seal leaked."), ("", "The pump stood still. Its seal was new.")),
        (("", "The seal of the pump failed in March."), ("", "The seal is blue. The pump is red. It failed in March.")),
        (("Pump seal", "It failed in March."), ("Pump manual of the works with a seal", "It failed in March.")),
    ],
)
def test_more_words_in_one_sentence_and_in_a_short_title_make_it_surer(
    more: tuple[str, str], less: tuple[str, str]
) -> None:
    above, below = sure("Why did the seal of the pump P-204 fail in March?", more, less)
    assert above > below


def test_a_word_that_few_documents_have_counts_more_than_one_that_all_have() -> None:
    report, other, *_ = sure(
        "kiln report", ("", "A kiln."), ("", "A report."), *[("", f"Report {n}.") for n in range(9)]
    )
    assert report > other


def test_every_confidence_is_a_share_and_no_weight_is_negative() -> None:
    assert min(FITTED[:-1]) >= 0
    assert features(QUESTION, FOUND).min() >= 0
    assert all(0 <= each <= 1 for each in confidences(QUESTION, FOUND))
    assert max(confidences("the of", FOUND)) < CONVINCING, "a question without a word finds nothing"
    assert confidences(QUESTION, []) == []


def test_what_was_delivered_is_judged_beside_all_that_was_found_and_nothing_is_not_convincing() -> None:
    env = make_env()
    episode = run(rollout(env, Script(search("Ada Lovelace Byron town")), Task("t", QUESTION)))
    judgement = judge(env.state.memory, episode.curated)
    assert judgement.confidence.keys() == {place.unit_id for place in episode.curated}
    assert judgement.convincing
    assert not judge(env.state.memory, ()).convincing
