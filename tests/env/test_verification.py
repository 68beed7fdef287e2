"""The lexical verifier says yes, no or unclear for reasons that can be read; the cache folds what is the same claim."""

from __future__ import annotations

import asyncio

import pytest

from harness1.env.verifiers import Judgement, LexicalVerifier
from harness1.memory.parts import VerificationCache
from harness1.records import UnitId, Verdict

CLAIM = "Marie Curie won the Nobel Prize in Physics in 1903."
DOCUMENT = "Marie Curie\nShe was a chemist. She won the Nobel Prize in physics in 1903. She died in France."


def judge(claim: str, *texts: str, verifier: LexicalVerifier | None = None) -> list[Judgement]:
    documents = [(UnitId(str(position)), text) for position, text in enumerate(texts)]
    judgements = asyncio.run((verifier or LexicalVerifier()).judge(claim, documents))
    assert all(isinstance(judgement, Judgement) for judgement in judgements)
    return [judgement for judgement in judgements if isinstance(judgement, Judgement)]


def test_yes_rests_on_the_passage_and_the_title_stands_for_the_pronoun() -> None:
    assert judge(CLAIM, DOCUMENT) == [Judgement("yes", "She won the Nobel Prize in physics in 1903.")]


def test_a_passage_may_reach_over_three_sentences() -> None:
    text = "Marie Curie was there. The Nobel Prize was new. She won it. Physics, 1903. Unrelated words follow."
    assert judge(CLAIM, text)[0].label == "yes"
    assert judge(CLAIM, text.replace(" Physics", " Then it rained. It snowed. Physics"))[0].label == "unclear"


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (CLAIM, DOCUMENT.replace("1903", "1911")),
        (CLAIM, DOCUMENT.replace("won the", "never won the")),
        ("Sales of Acme rose 5% in March.", "Sales of Acme rose 6% in March."),
        ("Sales of Acme rose 5% in March.", "Sales of Acme rose 5% in April."),
        ("Zinc does not increase growth of maize roots.", "Zinc will increase growth of maize roots."),
        ("Zinc increases the growth of maize roots in sand.", "Zinc decreases the growth of maize roots in sand."),
    ],
)
def test_no_needs_a_conflict_of_number_date_or_polarity(claim: str, text: str) -> None:
    assert judge(claim, text)[0].label == "no"


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (CLAIM, DOCUMENT.replace("Marie Curie", "Pierre Janet")),
        (f"{CLAIM[:-1]} for careful long patient work.", f"Janet. {DOCUMENT[16:-1]} for careful long patient work."),
        (CLAIM, DOCUMENT.replace(" in 1903", "")),
        ("Zinc helps maize roots grow deeper into sandy soil.", "Zinc is a metal."),
        (CLAIM, "Marie Curie was born in Warsaw. The city is large."),
        ("Sales of Acme rose 5% in total.", "Sales of Acme rose by 6 units in total."),
        (CLAIM, ""),
        ("", DOCUMENT),
        ("of the", "of the"),
    ],
)
def test_what_is_not_said_is_unclear(claim: str, text: str) -> None:
    assert judge(claim, text)[0].label == "unclear"


def test_two_negations_agree() -> None:
    assert judge("Zinc does not help maize grow.", "Zinc didn't help maize grow.")[0].label == "yes"


@pytest.mark.parametrize("text", ["a" * 10**6, "A. " * 10**5, "\ud800\x00 Nobel" * 10**4, "1," * 10**5, "\n" * 10**5])
def test_hostile_text_raises_nothing(text: str) -> None:
    assert len(judge(CLAIM + text[:100], text)) == 1


def verdict(claim: str, unit: str = "p") -> Verdict:
    return Verdict(unit_id=UnitId(unit), claim=claim, label="yes")


def test_the_cache_folds_case_white_space_and_final_punctuation() -> None:
    cache = VerificationCache()
    cache.put(verdict("The sky  is Blue."))
    assert cache.get(" the SKY is\nblue!", UnitId("p")) == verdict("The sky  is Blue.")
    assert cache.get("the sky is blue", UnitId("q")) is None
    assert cache.get("the sky. is blue", UnitId("p")) is None


def test_recent_gives_the_newest_first_and_a_new_verdict_replaces_the_old() -> None:
    cache = VerificationCache()
    for claim in ("a", "b", "c", "A."):
        cache.put(verdict(claim))
    assert [v.claim for v in cache.recent(2)] == ["A.", "c"]
    assert [v.claim for v in cache.recent(9)] == ["A.", "c", "b"]
