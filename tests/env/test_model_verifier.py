"""A model judges passages; thresholds make verdicts of what it says; its failures are faults."""

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
from harness1.policy.scripted import ScriptedPolicy
from harness1.records import UnitId
from tests.retrieval.test_cross_encoder import save_pair_model
from tests.support import CORPUS, QUICK, WordRetriever, call, play, search

CLAIM = "Marie Curie won the Nobel Prize in 1903."
DOCUMENT = "Marie Curie was a chemist. It rained. She won the prize in 1903. She died in France."


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


def judge(verifier: CrossEncoderVerifier, *texts: str) -> list[Judgement | VerifierFault]:
    documents = [(UnitId(str(place)), text) for place, text in enumerate(texts)]
    return asyncio.run(verifier.judge(CLAIM, documents))


def judged(says: Callable[[str], tuple[float, float]], text: str = DOCUMENT) -> Judgement | VerifierFault:
    return judge(CrossEncoderVerifier(Stances(says)), text)[0]


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
    assert judge(CrossEncoderVerifier(scorer), DOCUMENT) == [Judgement("yes", "She won the prize in 1903.")]
    assert (CLAIM, "Marie Curie was a chemist. She won the prize in 1903.") in scorer.read
    assert (CLAIM, "Marie Curie was a chemist. It rained.") in scorer.read
    assert len(scorer.read) == len(set(scorer.read))


def test_of_a_long_document_the_sentences_nearest_to_the_claim_are_read() -> None:
    scorer = Stances(lambda text: (float("1903" in text), 0.0))
    text = "A title. " + "Filler words stand here. " * 150 + "The winner of a Nobel prize was she. It was 1903."
    (judgement,) = judge(CrossEncoderVerifier(scorer), text)
    assert judgement.label == "yes"
    assert len(scorer.read) <= 16


def test_only_the_first_characters_are_read_and_documents_keep_their_order() -> None:
    scorer = Stances(lambda text: (float("1903" in text), 0.0))
    verifier = CrossEncoderVerifier(scorer, characters=60)
    late = "Filler words stand here. " * 3 + DOCUMENT
    labels = [found.label for found in judge(verifier, late, "In 1903.", "", DOCUMENT[:30])]
    assert labels == ["unclear", "yes", "unclear", "unclear"]
    assert "won" not in " ".join(text for _, text in scorer.read)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("no numbers"), OSError("device")])
def test_a_failing_model_is_a_fault_of_every_document(error: Exception) -> None:
    def fail(text: str) -> tuple[float, float]:
        raise error

    faults = judge(CrossEncoderVerifier(Stances(fail)), DOCUMENT, DOCUMENT)
    assert faults == [VerifierFault(f"cross-encoder: {type(error).__name__}: {error}")] * 2


def configured(reranker: str = "", **options: object) -> Config:
    return Config(Env(verification=Verification(judge="cross_encoder", **options)), machine=Machine(reranker=reranker))


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
    assert judge(verifier, DOCUMENT) == judge(verifier, DOCUMENT)
    assert isinstance(judge(verifier, DOCUMENT)[0], Judgement)


def test_a_verifier_without_a_model_is_refused_where_it_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"machine\.reranker"):
        open_verifier(configured().env, Machine())
    assert isinstance(open_verifier(configured(on=False).env, Machine()), NoVerifier)


def test_an_environment_that_was_not_given_the_configured_verifier_does_not_judge_by_another() -> None:
    env = SearchEnv(configured().env, WordRetriever(CORPUS), machine=QUICK)
    with pytest.raises(InfrastructureFault, match="open_verifier"):
        play(env, search("Ada Lovelace"), call("verify", doc_ids=["D1"], claim="Ada wrote programs."))
    assert isinstance(SearchEnv(Env(), WordRetriever(CORPUS)).verifier, LexicalVerifier)
