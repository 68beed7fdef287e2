"""The lexical verifier says yes, no or unclear for reasons that can be read; the cache folds what is the same claim."""

from __future__ import annotations

import asyncio

import pytest

from harness1.config import Env, Machine, Verification
from harness1.env.environment import SearchEnv
from harness1.env.model_verifiers import open_verifier
from harness1.env.verifiers import Judgement, LexicalVerifier, NoVerifier
from harness1.errors import ConfigError, InfrastructureFault
from harness1.memory.parts import VerificationCache
from harness1.records import UnitId, Verdict
from tests.support import CORPUS, QUICK, WordRetriever, call, play, search

CLAIM = "Marie Curie won the Nobel Prize in Physics in 1903."
DOCUMENT = "Marie Curie\nShe was a chemist. She won the Nobel Prize in physics in 1903. She died in France."


def judge(claim: str, *texts: str, verifier: LexicalVerifier | None = None) -> list[Judgement]:
    documents = [(UnitId(str(position)), text) for position, text in enumerate(texts)]
    return asyncio.run((verifier or LexicalVerifier()).judge(claim, documents))


def test_yes_rests_on_a_passage_of_up_to_three_sentences_and_the_title_stands_for_the_pronoun() -> None:
    assert judge(CLAIM, DOCUMENT) == [Judgement("yes", "She won the Nobel Prize in physics in 1903.")]
    assert judge("Zinc does not help maize grow.", "Zinc didn't help maize grow.")[0].label == "yes"
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


def test_hostile_text_raises_nothing() -> None:
    for text in ("a" * 10**6, "A. " * 10**5, "\ud800\x00 Nobel" * 10**4, "1," * 10**5, "\n" * 10**5):
        assert len(judge(CLAIM + text[:100], text)) == 1


def test_by_words_only_the_first_characters_are_read_and_documents_keep_their_order() -> None:
    late = "Filler words stand here. " * 10 + DOCUMENT
    short = LexicalVerifier(characters=200)
    assert [each.label for each in judge(CLAIM, late, DOCUMENT, verifier=short)] == ["unclear", "yes"]
    assert judge(CLAIM, late.replace("Filler", "Marie Curie", 1))[0].label == "yes"


def test_the_cache_folds_case_space_and_final_punctuation_and_gives_the_newest_verdicts_first() -> None:
    cache = VerificationCache()
    for claim in ("The sky  is Blue.", "b", "c"):
        cache.put(Verdict(UnitId("p"), claim, "yes"))
    assert cache.get(" the SKY is\nblue!", UnitId("p")) == Verdict(UnitId("p"), "The sky  is Blue.", "yes")
    assert cache.get("the sky is blue", UnitId("q")) is cache.get("the sky. is blue", UnitId("p")) is None
    cache.put(Verdict(UnitId("p"), "the sky is blue", "no"))
    assert [kept.claim for kept in cache.recent(2)] == ["the sky is blue", "c"]
    assert [kept.claim for kept in cache.recent(9)] == ["the sky is blue", "c", "b"]


def test_a_verifier_that_was_removed_or_not_opened_is_refused_and_no_other_judges_in_its_place() -> None:
    removed = Env(verification=Verification(judge="cross_encoder"))
    with pytest.raises(ConfigError, match="was removed"):
        open_verifier(removed, Machine())
    assert isinstance(open_verifier(removed.switch(verification=False), Machine()), NoVerifier)
    env = SearchEnv(removed, WordRetriever(CORPUS), machine=QUICK)
    with pytest.raises(InfrastructureFault, match="open_verifier"):
        play(env, search("Ada Lovelace"), call("verify", doc_ids=["D1"], claim="Ada wrote programs."))
    for lexical in (SearchEnv(Env(), WordRetriever(CORPUS)).verifier, open_verifier(Env(), Machine())):
        assert isinstance(lexical, LexicalVerifier)
        assert lexical.characters == 6000
