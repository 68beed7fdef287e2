"""A local verifier: logistic regression over features of claim and text, with sentence embeddings if there are any."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness1.env.verifiers.features import NAMES, NEAREST, Sentence, compare, nearest, read, split_subject
from harness1.env.verifiers.protocol import Judgement, Label, VerifierFault
from harness1.records import Record, UnitId
from harness1.retrieval.batching import Batcher
from harness1.retrieval.dense.embedder import Embedder

ENGINE_ERRORS = (RuntimeError, ValueError, OSError)
"""Errors of a model: out of memory, a lost device, an output that is not a number."""
LABELS: tuple[Label, ...] = ("yes", "no", "unclear")
COSINES = ("cosine", "second_cosine", "mean_cosine", "best_cosine")
"""Features beside `features.NAMES` with an embedding model: the highest, second highest and mean cosine of the claim
with its nearest sentences, and that of the sentence that covers most."""
SHORT = 3
"""Sentences up to which a text is short. Short texts have weights of their own on top of those for all."""
KNEE = 0.5
"""Standard deviations from the mean beyond which a feature has another slope, on either side."""
FORMS = 6
"""Weights of one feature for one label: slope, slope above and below the knees, and the same for short texts."""

Array: TypeAlias = NDArray[np.float64]


class Fit(Record):
    """One set of weights. Each feature has its mean, its standard deviation, and `FORMS` weights for each label."""

    intercept: tuple[tuple[float, float], ...]
    """For each label: a constant, and one more for short texts."""
    features: dict[str, tuple[float, ...]]

    def scores(self, values: Array, short: NDArray[np.bool_]) -> Array:
        """Return a score for each label, shape [texts, 3]; the softmax of a row gives probabilities.

        Args:
            values: shape [texts, features], in the order of `features`.
            short: which texts are short.
        """
        table = np.array(list(self.features.values()))
        weights = table[:, 2:].reshape(len(table), len(LABELS), FORMS)
        forms = expand((values - table[:, 0]) / table[:, 1], short)
        constants = np.array(self.intercept)
        scores: Array = np.einsum("tfk,flk->tl", forms, weights) + constants[:, 0] + short[:, None] * constants[:, 1]
        return scores


class Fits(Record):
    """The weights in `fitted_weights.toml`."""

    words: Fit
    """Without an embedding model."""
    embeddings: Fit


class Compared(Record):
    """A text compared with a claim: features, and the sentences that embeddings compare, best first."""

    features: tuple[float, ...]
    short: bool
    nearest: tuple[str, ...]
    embedded: tuple[str, ...]
    """The same sentences after the name of their subject."""


def expand(scaled: Array, short: NDArray[np.bool_]) -> Array:
    """Return the forms of scaled features, which make scores piecewise linear; shape [texts, features, FORMS]."""
    forms = np.stack([scaled, np.maximum(scaled - KNEE, 0), np.maximum(-KNEE - scaled, 0)], axis=-1)
    return np.concatenate([forms, forms * short[:, None, None]], axis=-1)


def compared(claim: Sentence, text: str) -> Compared:
    """Compare a text, whose first line may be its title, with a claim."""
    first, rest = split_subject(text)
    sentences = [read(each) for each in rest]
    order = nearest(claim, sentences)
    features = compare(claim, read(first), sentences, order)
    shown = tuple(rest[at] for at in order[:NEAREST])
    subject = _SECTION.split(first)[0].strip()
    named = tuple(f"{subject}: {each}" for each in shown)
    return Compared(tuple(getattr(features, name) for name in NAMES), len(rest) <= SHORT, shown, named)


def cosines(claim: NDArray[np.float32], sentences: NDArray[np.float32]) -> Array:
    """Return the cosine of a claim with each sentence, from vectors of length 1."""
    return (sentences @ claim).astype(np.float64)


def summary(similar: Array) -> tuple[float, ...]:
    """Return the features `COSINES`."""
    ranked = np.sort(similar)[::-1]
    return float(ranked[0]), float(ranked[min(1, len(ranked) - 1)]), float(ranked.mean()), float(similar[0])


class FittedVerifier:
    """Tells support, contradiction and neither apart; an embedding model works in a thread, in batches of all episodes.

    The weights were fitted by `benchmarks/fit_verifier.py` with equally many texts of each kind. Most texts that a
    search finds say nothing about a claim, so a `yes` or `no` is a hint. A verdict does not depend on the other texts
    of its batch.

    Args:
        embedder: compares sentences; None: words alone.
        characters: how much of each document is read, from its beginning.
        window_s, size: the wait for a shared batch in seconds, and the texts of a full one.
    """

    def __init__(
        self, embedder: Embedder | None = None, characters: int = 6000, window_s: float = 0.002, size: int = 64
    ) -> None:
        self.characters, self._embedder = characters, embedder
        self._fit = fits().words if embedder is None else fits().embeddings
        self._batcher: Batcher[tuple[str, str], Judgement] = Batcher(self._judge, window_s, size)

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        """Judge each document; if the embedding model fails, return a fault for each."""
        pairs = [(claim, text[: self.characters]) for _, text in documents]
        if self._embedder is None:
            # Words alone take a few milliseconds; handing them to a thread can take longer.
            return list(self._judge(pairs)) if pairs else []
        try:
            return list(await self._batcher.submit(pairs))
        except ENGINE_ERRORS as error:
            return [VerifierFault(f"embedding model: {type(error).__name__}: {error}") for _ in documents]

    def _judge(self, pairs: list[tuple[str, str]]) -> list[Judgement]:
        claims = {claim: read(claim) for claim, _ in pairs}
        texts = [compared(claims[claim], text) for claim, text in pairs]
        values, rests = np.array([text.features for text in texts]), [text.nearest[0] for text in texts]
        if self._embedder is not None:
            alike = similar(self._embedder, [claim for claim, _ in pairs], texts)
            values = np.hstack([values, [summary(each) for each in alike]])
            rests = [text.nearest[int(each.argmax())] for text, each in zip(texts, alike, strict=True)]
        scores = self._fit.scores(values, np.array([text.short for text in texts]))
        return [
            Judgement(LABELS[int(row.argmax())] if claims[claim].terms and text.strip() else "unclear", rest)
            for (claim, text), row, rest in zip(pairs, scores, rests, strict=True)
        ]


def similar(embedder: Embedder, claims: Sequence[str], texts: Sequence[Compared]) -> list[Array]:
    """Return the cosines of each text's nearest sentences with its claim. Queries have equal vectors in any batch."""
    places = {each: at for at, each in enumerate(dict.fromkeys([*claims, *(one for t in texts for one in t.embedded)]))}
    vectors = embedder.embed_queries(list(places))
    return [
        cosines(vectors[places[claim]], vectors[[places[each] for each in text.embedded]])
        for claim, text in zip(claims, texts, strict=True)
    ]


_SECTION = re.compile(r"\s+[-–|]\s+")
"""What stands between a page and its section in a title."""


@lru_cache(maxsize=1)
def fits() -> Fits:
    """Return the weights that come with the package."""
    return msgspec.toml.decode(resources.files(__package__).joinpath("fitted_weights.toml").read_bytes(), type=Fits)
