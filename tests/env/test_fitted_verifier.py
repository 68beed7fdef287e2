"""The fitted verifier: weights to verdicts, the same in any batch, with and without an embedding model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from harness1.config import Env, Machine, Verification
from harness1.env.verifiers.features import NAMES
from harness1.env.verifiers.fitted import COSINES, FORMS, LABELS, Fit, FittedVerifier, expand, fits, summary
from harness1.env.verifiers.open import NoVerifier, open_verifier, unopened_verifier
from harness1.env.verifiers.protocol import Judgement, VerifierFault
from harness1.errors import UsageError
from harness1.records import UnitId
from harness1.retrieval.dense.embedder import HashEmbedder

CLAIM = "Zinc supplements increase the growth of maize roots."
ABOUT = "Zinc and maize\nZinc supplements increased the growth of maize roots. We conclude that zinc helps maize."
ELSEWHERE = (
    "A history of opera\nThe first operas were sung in Florence. Monteverdi wrote in Venice. Halls opened later."
)


def judge(verifier: FittedVerifier, claim: str, *texts: str) -> list[Judgement | VerifierFault]:
    documents = [(UnitId(str(place)), text) for place, text in enumerate(texts)]
    return asyncio.run(verifier.judge(claim, documents))


def labels(verifier: FittedVerifier, claim: str, *texts: str) -> list[str]:
    return [found.label for found in judge(verifier, claim, *texts) if isinstance(found, Judgement)]


def test_a_text_that_says_it_is_told_from_one_about_something_else() -> None:
    assert labels(FittedVerifier(), CLAIM, ABOUT, ELSEWHERE) == ["yes", "unclear"]


@pytest.mark.parametrize("embedder", [None, HashEmbedder(64)])
def test_a_verdict_does_not_depend_on_its_neighbours(embedder: HashEmbedder | None) -> None:
    verifier = FittedVerifier(embedder)
    alone = [judge(verifier, CLAIM, text)[0] for text in (ABOUT, ELSEWHERE, "")]
    assert judge(verifier, CLAIM, ABOUT, ELSEWHERE, "") == alone
    assert judge(verifier, CLAIM, "", ELSEWHERE, ABOUT) == alone[::-1]


def test_a_verdict_rests_on_the_sentence_that_is_nearest() -> None:
    for verifier in (FittedVerifier(), FittedVerifier(HashEmbedder(256))):
        (found,) = judge(verifier, CLAIM, ABOUT)
        assert isinstance(found, Judgement)
        assert found.sentence == "Zinc supplements increased the growth of maize roots."


def test_nothing_to_compare_is_unclear() -> None:
    assert labels(FittedVerifier(), "It is as it was.", ABOUT) == ["unclear"]
    assert labels(FittedVerifier(), CLAIM, "", " \n ") == ["unclear", "unclear"]
    assert judge(FittedVerifier(), CLAIM) == []


def test_only_the_first_characters_are_read() -> None:
    late = f"Filler words stand here.{' More of them stand here.' * 4}\n{ABOUT}"
    assert labels(FittedVerifier(characters=60), CLAIM, late) == ["unclear"]


class Broken(HashEmbedder):
    """Fails as a model does."""

    def __init__(self, error: Exception) -> None:
        super().__init__(8)
        self.error = error

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("not finite"), OSError("device")])
def test_a_failing_model_is_a_fault_of_every_document(error: Exception) -> None:
    fault = VerifierFault(f"embedding model: {type(error).__name__}: {error}")
    assert judge(FittedVerifier(Broken(error)), CLAIM, ABOUT, ELSEWHERE) == [fault, fault]


def test_scores_are_piecewise_linear_and_short_texts_add_weights_of_their_own() -> None:
    short = np.array([False, True, True])
    forms = expand(np.array([[2.0], [-1.0], [0.2]]), short)[:, 0]
    assert forms.tolist() == [[2, 1.5, 0, 0, 0, 0], [-1, 0, 0.5, -1, 0, 0.5], [0.2, 0, 0, 0.2, 0, 0]]
    yes, no, unclear = (1.0, 0, 0, 0, 0, 0), (0, 10.0, 0, 0, 0, 100.0), (0.0,) * FORMS
    fit = Fit(((0.5, 0.25), (0, 0), (0, 0)), {"x": (3.0, 2.0, *yes, *no, *unclear)})
    values = np.array([[7.0], [1.0], [3.4]])
    assert fit.scores(values, short).tolist() == [[2.5, 15.0, 0], [-0.25, 50.0, 0], [pytest.approx(0.95), 0, 0]]


def test_the_weights_are_those_of_the_features() -> None:
    assert tuple(fits().words.features) == NAMES
    assert tuple(fits().embeddings.features) == (*NAMES, *COSINES)
    for fit in (fits().words, fits().embeddings):
        assert len(fit.intercept) == len(LABELS)
        assert {len(row) for row in fit.features.values()} == {2 + FORMS * len(LABELS)}
        assert all(row[1] > 0 for row in fit.features.values())


def test_cosines_are_summed_up() -> None:
    assert summary(np.array([0.25, 0.75, 0.5])) == (0.75, 0.5, 0.5, 0.25)
    assert summary(np.array([0.5])) == (0.5, 0.5, 0.5, 0.5)


def fitted(**options: object) -> Env:
    return Env(verification=Verification(judge="fitted", **options))


def test_the_configuration_chooses_words_or_an_embedding_model() -> None:
    words = open_verifier(fitted(characters=77), Machine())
    assert isinstance(words, FittedVerifier)
    assert words.characters == 77
    assert judge(words, CLAIM, ABOUT) == judge(FittedVerifier(None, 77), CLAIM, ABOUT)
    # What an index has elsewhere on this machine is not the verifier's model.
    modelled = open_verifier(fitted(model="hash:64"), Machine(embedder="nowhere"))
    assert isinstance(modelled, FittedVerifier)
    assert judge(modelled, CLAIM, ABOUT, ELSEWHERE) == judge(FittedVerifier(HashEmbedder(64)), CLAIM, ABOUT, ELSEWHERE)
    with pytest.raises(UsageError, match="no_such_model"):
        open_verifier(fitted(model="package:no_such_model"), Machine())


def test_only_a_verifier_without_a_model_needs_no_opening() -> None:
    assert isinstance(unopened_verifier(fitted()), FittedVerifier)
    assert isinstance(unopened_verifier(fitted(model="hash:64")), NoVerifier)
