"""The lexical verifier says yes, no or unclear for reasons that can be read; the cache folds what is the same claim."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harness1.config import Config, Env, Machine, Verification
from harness1.env.environment import SearchEnv
from harness1.env.model_verifiers import CrossEncoderVerifier, open_verifier
from harness1.env.verifiers import Judgement, LexicalVerifier, NoVerifier, VerifierFault
from harness1.episodes.jobs import EpisodeSetup
from harness1.errors import ConfigError, InfrastructureFault
from harness1.memory.parts import VerificationCache
from harness1.policy.scripted import ScriptedPolicy
from harness1.records import UnitId, Verdict
from tests.retrieval.test_retrieval_models import save_pair_model
from tests.support import CORPUS, QUICK, WordRetriever, call, play, search

CLAIM = "Marie Curie won the Nobel Prize in Physics in 1903."
DOCUMENT = "Marie Curie\nShe was a chemist. She won the Nobel Prize in physics in 1903. She died in France."


def judge(claim: str, *texts: str, verifier: LexicalVerifier | None = None) -> list[Judgement]:
    documents = [(UnitId(str(position)), text) for position, text in enumerate(texts)]
    judgements = asyncio.run((verifier or LexicalVerifier()).judge(claim, documents))
    assert all(isinstance(judgement, Judgement) for judgement in judgements)
    return [judgement for judgement in judgements if isinstance(judgement, Judgement)]


def test_yes_rests_on_the_passage_and_the_title_stands_for_the_pronoun() -> None:
    assert judge(CLAIM, DOCUMENT) == [Judgement("yes", "She won the Nobel Prize in physics in 1903.")]
    assert judge("Zinc does not help maize grow.", "Zinc didn't help maize grow.")[0].label == "yes"


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


PRIZE = "Marie Curie won the Nobel Prize in 1903."
CHEMIST = "Marie Curie was a chemist. It rained. She won the prize in 1903. She died in France."


class Stances:
    """Says of a text what `says` says, and remembers what it read."""

    hash = "stances"

    def __init__(self, says: Callable[[str], tuple[float, float]]) -> None:
        self.says = says
        self.read: list[tuple[str, str]] = []

    def stances(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        self.read += pairs
        return np.array([self.says(text) for _, text in pairs], dtype=np.float32).reshape(-1, 2)

    def score(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        return self.stances(pairs)[:, 0]


def judge_by(verifier: CrossEncoderVerifier, *texts: str) -> list[Judgement | VerifierFault]:
    documents = [(UnitId(str(place)), text) for place, text in enumerate(texts)]
    return asyncio.run(verifier.judge(PRIZE, documents))


def judged(says: Callable[[str], tuple[float, float]], text: str = CHEMIST) -> Judgement | VerifierFault:
    return judge_by(CrossEncoderVerifier(Stances(says)), text)[0]


def test_a_document_rests_on_its_best_passage_or_names_the_nearest_one() -> None:
    best = judged(lambda text: (0.9 if "1903. She" in text else 0.6, 0.0))
    assert best == Judgement("yes", "She won the prize in 1903. She died in France.")
    assert judged(lambda text: (0.6, 0.0)) == Judgement("yes", "She died in France.")
    near = judged(lambda text: (0.4 if text.endswith("chemist. She died in France.") else 0.1, 0.0))
    assert near == Judgement("unclear", "She died in France.")


def test_a_passage_that_contradicts_makes_it_no_unless_another_supports_as_much() -> None:
    assert judged(lambda text: (0.1, 0.9 if "rained" in text else 0.2)).label == "no"
    assert judged(lambda text: (0.1, 0.7)).label == "unclear"
    assert judged(lambda text: (0.85 if "chemist" in text else 0.0, 0.9)).label == "no"
    assert judged(lambda text: (0.9 if "France" in text else 0.0, 0.85)) == Judgement("yes", "She died in France.")


def test_the_first_sentence_goes_before_passages_that_lie_further_on() -> None:
    scorer = Stances(lambda text: (float("She won" in text and "France" not in text and "rained" not in text), 0.0))
    assert judge_by(CrossEncoderVerifier(scorer), CHEMIST) == [Judgement("yes", "She won the prize in 1903.")]
    assert (PRIZE, "Marie Curie was a chemist. She won the prize in 1903.") in scorer.read
    assert (PRIZE, "Marie Curie was a chemist. It rained.") in scorer.read
    assert len(scorer.read) == len(set(scorer.read))


def test_of_a_long_document_the_sentences_nearest_to_the_claim_are_read() -> None:
    scorer = Stances(lambda text: (float("1903" in text), 0.0))
    text = "A title. " + "Filler words stand here. " * 150 + "The winner of a Nobel prize was she. It was 1903."
    (judgement,) = judge_by(CrossEncoderVerifier(scorer), text)
    assert judgement.label == "yes"
    assert len(scorer.read) <= 16


def test_only_the_first_characters_are_read_and_documents_keep_their_order() -> None:
    scorer = Stances(lambda text: (float("1903" in text), 0.0))
    late = "Filler words stand here. " * 3 + CHEMIST
    found = judge_by(CrossEncoderVerifier(scorer, characters=60), late, "In 1903.", "", CHEMIST[:30])
    assert [each.label for each in found] == ["unclear", "yes", "unclear", "unclear"]
    assert "won" not in " ".join(text for _, text in scorer.read)


def test_a_failing_model_is_a_fault_of_every_document() -> None:
    for error in (RuntimeError("CUDA out of memory"), ValueError("no numbers"), OSError("device")):

        def fail(text: str, error: Exception = error) -> tuple[float, float]:
            raise error

        faults = judge_by(CrossEncoderVerifier(Stances(fail)), CHEMIST, CHEMIST)
        assert faults == [VerifierFault(f"cross-encoder: {type(error).__name__}: {error}")] * 2


def configured(reranker: str = "") -> Config:
    return Config(Env(verification=Verification(judge="cross_encoder")), machine=Machine(reranker=reranker))


def test_the_configuration_chooses_the_verifier(tmp_path: Path) -> None:
    chosen = configured(str(save_pair_model(tmp_path)))
    verifier, lexical = open_verifier(chosen.env, chosen.machine), open_verifier(Env(), Machine())
    assert isinstance(verifier, CrossEncoderVerifier)
    assert isinstance(lexical, LexicalVerifier)
    assert verifier.characters == lexical.characters == 6000
    setup = EpisodeSetup(chosen, "", "scripted").environment(WordRetriever(CORPUS), ScriptedPolicy())
    assert isinstance(setup.verifier, CrossEncoderVerifier)
    (judgement,) = judge_by(verifier, CHEMIST)
    assert isinstance(judgement, Judgement)
    assert [judgement] == judge_by(verifier, CHEMIST)


def test_a_verifier_without_a_model_is_refused_and_no_other_judges_in_its_place() -> None:
    with pytest.raises(ConfigError, match=r"machine\.reranker"):
        open_verifier(configured().env, Machine())
    assert isinstance(open_verifier(configured().env.switch(verification=False), Machine()), NoVerifier)
    env = SearchEnv(configured().env, WordRetriever(CORPUS), machine=QUICK)
    with pytest.raises(InfrastructureFault, match="open_verifier"):
        play(env, search("Ada Lovelace"), call("verify", doc_ids=["D1"], claim="Ada wrote programs."))
    assert isinstance(SearchEnv(Env(), WordRetriever(CORPUS)).verifier, LexicalVerifier)
