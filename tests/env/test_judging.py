"""The lexical verifier says yes, no or unclear for reasons that can be read; the cache folds what is the same claim."""

from __future__ import annotations

import asyncio
import threading
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


def test_by_words_only_the_first_characters_are_read_and_documents_keep_their_order() -> None:
    late = "Filler words stand here. " * 10 + DOCUMENT
    short = LexicalVerifier(characters=200)
    assert [each.label for each in judge(CLAIM, late, DOCUMENT, verifier=short)] == ["unclear", "yes"]
    assert judge(CLAIM, late.replace("Filler", "Marie Curie", 1))[0].label == "yes"


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


CLAIM_MODEL_VERIFIER = "Marie Curie won the Nobel Prize in 1903."
DOCUMENT_MODEL_VERIFIER = "Marie Curie was a chemist. It rained. She won the prize in 1903. She died in France."


class Stances:
    """Says of a text what `says` says, and remembers what it read."""

    hash = "stances"

    def __init__(self, says: Callable[[str], tuple[float, float]]) -> None:
        self.says = says
        self.read: list[tuple[str, str]] = []
        self.threads: set[int] = set()

    def stances(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        self.read += pairs
        self.threads.add(threading.get_ident())
        return np.array([self.says(text) for _, text in pairs], dtype=np.float32).reshape(-1, 2)

    def score(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        return self.stances(pairs)[:, 0]


def judge_model_verifier(verifier: CrossEncoderVerifier, *texts: str) -> list[Judgement | VerifierFault]:
    documents = [(UnitId(str(place)), text) for place, text in enumerate(texts)]
    return asyncio.run(verifier.judge(CLAIM_MODEL_VERIFIER, documents))


def judged(
    says: Callable[[str], tuple[float, float]], text: str = DOCUMENT_MODEL_VERIFIER
) -> Judgement | VerifierFault:
    return judge_model_verifier(CrossEncoderVerifier(Stances(says)), text)[0]


def test_a_document_rests_on_its_best_passage() -> None:
    assert judged(lambda text: (0.9 if "1903. She" in text else 0.6, 0.0)) == Judgement(
        "yes", "She won the prize in 1903. She died in France."
    )
    assert judged(lambda text: (0.6, 0.0)) == Judgement("yes", "She died in France.")


def test_what_supports_a_little_is_unclear_and_names_the_nearest_passage() -> None:
    assert judged(lambda text: (0.4 if text.endswith("chemist. She died in France.") else 0.1, 0.0)) == Judgement(
        "unclear", "She died in France."
    )


def test_a_passage_that_contradicts_makes_it_no_unless_another_supports_as_much() -> None:
    assert judged(lambda text: (0.1, 0.9 if "rained" in text else 0.2)).label == "no"
    assert judged(lambda text: (0.1, 0.7)).label == "unclear"
    assert judged(lambda text: (0.85 if "chemist" in text else 0.0, 0.9)).label == "no"
    assert judged(lambda text: (0.9 if "France" in text else 0.0, 0.85)) == Judgement("yes", "She died in France.")


def test_the_first_sentence_goes_before_passages_that_lie_further_on() -> None:
    scorer = Stances(lambda text: (float("She won" in text and "France" not in text and "rained" not in text), 0.0))
    assert judge_model_verifier(CrossEncoderVerifier(scorer), DOCUMENT_MODEL_VERIFIER) == [
        Judgement("yes", "She won the prize in 1903.")
    ]
    assert (CLAIM_MODEL_VERIFIER, "Marie Curie was a chemist. She won the prize in 1903.") in scorer.read
    assert (CLAIM_MODEL_VERIFIER, "Marie Curie was a chemist. It rained.") in scorer.read
    assert len(scorer.read) == len(set(scorer.read))


def test_of_a_long_document_the_sentences_nearest_to_the_claim_are_read() -> None:
    scorer = Stances(lambda text: (float("1903" in text), 0.0))
    text = "A title. " + "Filler words stand here. " * 150 + "The winner of a Nobel prize was she. It was 1903."
    (judgement,) = judge_model_verifier(CrossEncoderVerifier(scorer), text)
    assert judgement.label == "yes"
    assert len(scorer.read) <= 16


def test_only_the_first_characters_are_read_and_documents_keep_their_order() -> None:
    scorer = Stances(lambda text: (float("1903" in text), 0.0))
    verifier = CrossEncoderVerifier(scorer, characters=60)
    late = "Filler words stand here. " * 3 + DOCUMENT_MODEL_VERIFIER
    labels = [
        found.label for found in judge_model_verifier(verifier, late, "In 1903.", "", DOCUMENT_MODEL_VERIFIER[:30])
    ]
    assert labels == ["unclear", "yes", "unclear", "unclear"]
    assert "won" not in " ".join(text for _, text in scorer.read)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("no numbers"), OSError("device")])
def test_a_failing_model_is_a_fault_of_every_document(error: Exception) -> None:
    def fail(text: str) -> tuple[float, float]:
        raise error

    faults = judge_model_verifier(CrossEncoderVerifier(Stances(fail)), DOCUMENT_MODEL_VERIFIER, DOCUMENT_MODEL_VERIFIER)
    assert faults == [VerifierFault(f"cross-encoder: {type(error).__name__}: {error}")] * 2


def configured(reranker: str = "") -> Config:
    return Config(Env(verification=Verification(judge="cross_encoder")), machine=Machine(reranker=reranker))


def test_the_configuration_chooses_the_verifier(tmp_path: Path) -> None:
    chosen = configured(str(save_pair_model(tmp_path)))
    verifier = open_verifier(chosen.env, chosen.machine)
    assert isinstance(verifier, CrossEncoderVerifier)
    assert verifier.characters == 6000
    assert isinstance(
        EpisodeSetup(chosen, "", "scripted").environment(WordRetriever(CORPUS), ScriptedPolicy()).verifier,
        CrossEncoderVerifier,
    )
    lexical = open_verifier(Env(), Machine())
    assert isinstance(lexical, LexicalVerifier)
    assert lexical.characters == 6000
    assert judge_model_verifier(verifier, DOCUMENT_MODEL_VERIFIER) == judge_model_verifier(
        verifier, DOCUMENT_MODEL_VERIFIER
    )
    assert isinstance(judge_model_verifier(verifier, DOCUMENT_MODEL_VERIFIER)[0], Judgement)


def test_a_verifier_without_a_model_is_refused_where_it_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"machine\.reranker"):
        open_verifier(configured().env, Machine())
    assert isinstance(open_verifier(configured().env.switch(verification=False), Machine()), NoVerifier)


def test_an_environment_that_was_not_given_the_configured_verifier_does_not_judge_by_another() -> None:
    env = SearchEnv(configured().env, WordRetriever(CORPUS), machine=QUICK)
    with pytest.raises(InfrastructureFault, match="open_verifier"):
        play(env, search("Ada Lovelace"), call("verify", doc_ids=["D1"], claim="Ada wrote programs."))
    assert isinstance(SearchEnv(Env(), WordRetriever(CORPUS)).verifier, LexicalVerifier)
