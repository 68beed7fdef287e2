"""Verification by a cross-encoder, and the choice among all verifiers."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.config import Env, Run
from harness1.env.language_verifier import LanguageModelVerifier
from harness1.env.sentences import split
from harness1.env.verification import Judgement, LexicalVerifier, Verifier, VerifierFault
from harness1.errors import ConfigError
from harness1.model_endpoint import ModelEndpoint
from harness1.records import UnitId
from harness1.retrieval.analyser import Analyser
from harness1.retrieval.batching import Batcher
from harness1.retrieval.cross_encoder import Pair, StanceScorer, open_cross_encoder

SENTENCES = 4
"""Of a document, so many sentences with the most terms of the claim are read, alone and with their neighbours."""
BEFORE_AND_AFTER = ((0, 1), (0, 2), (-1, 1), (-1, 2))
"""Where passages begin and end, seen from such a sentence: one to three sentences."""
ENGINE_ERRORS = (RuntimeError, ValueError, OSError)
"""What a model may raise: no memory, a device that is gone, an output that is no number."""


def open_verifier(env: Env, run: Run) -> Verifier:
    """The verifier that `env.verification.judge` names.

    Raises:
        ConfigError, MissingExtra, UsageError: as `open_cross_encoder`, where it is the cross-encoder.
        ConfigError: the language model has no name or no address.
        MissingExtra: it is the language model, and aiohttp is not installed.
    """
    verification = env.verification
    if verification.judge == "lexical" or not verification.on:
        return unopened_verifier(env)
    if verification.judge == "language_model":
        return _language_verifier(env, run)
    scorer = open_cross_encoder(run)
    return CrossEncoderVerifier(scorer, verification.characters, run.batch_ms / 1000, run.batch_size)


def unopened_verifier(env: Env) -> Verifier:
    """What an environment has that was given no verifier: the lexical one, if it is the configured one."""
    judge, characters = env.verification.judge, env.verification.characters
    return LexicalVerifier(characters) if judge == "lexical" else NoVerifier(judge)


def _language_verifier(env: Env, run: Run) -> LanguageModelVerifier:
    needed = {"run.verifier.url": run.verifier.url, "env.verification.model": env.verification.model}
    if missing := [name for name, value in needed.items() if not value]:
        raise ConfigError(f"env.verification.judge=language_model needs {' and '.join(missing)}")
    verifier = run.verifier
    # One try each: the edge of the environment tries again.
    endpoint = ModelEndpoint(verifier.url, verifier.key, verifier.timeout_s, 1, concurrency=verifier.concurrency)
    return LanguageModelVerifier(endpoint, env.verification.model, env.verification.characters)


class CrossEncoderVerifier:
    """Judges the passages of a document by a model, in a thread, together with what other episodes ask.

    `yes` where a passage supports the claim, no less than any contradicts it; `no` where one contradicts it, which only
    models with such a label say; else `unclear`. It rests on the passage with the highest probability of that.

    Args:
        characters: how much of a document is read.
        window_s, size: how long a claim waits for others to share a batch with, and the pairs of a full one.
        support: the probability at which a passage supports.
        conflict: that at which it contradicts; higher, for models of entailment contradict what is merely unrelated.
    """

    def __init__(
        self,
        scorer: StanceScorer,
        characters: int = 6000,
        window_s: float = 0.002,
        size: int = 64,
        support: float = 0.5,
        conflict: float = 0.8,
    ) -> None:
        self.characters, self.support, self.conflict = characters, support, conflict
        self._scorer = scorer
        self._batcher: Batcher[Pair, tuple[float, float]] = Batcher(self._stances, window_s, size)

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        """Judge each document; where the model fails, all of them are faults."""
        passages = [_passages(claim, text[: self.characters]) for _, text in documents]
        pairs = [(claim, read) for found in passages for read in found]
        try:
            stances = iter(await self._batcher.submit(pairs))
        except ENGINE_ERRORS as error:
            return [VerifierFault(f"cross-encoder: {type(error).__name__}: {error}") for _ in documents]
        return [self._judge([(*next(stances), shown) for shown in found.values()]) for found in passages]

    def _stances(self, pairs: list[Pair]) -> list[tuple[float, float]]:
        return [(yes, no) for yes, no in self._scorer.stances(pairs).tolist()]

    def _judge(self, judged: Sequence[tuple[float, float, str]]) -> Judgement:
        """One document, from how its passages support and contradict; of equals the shortest counts."""
        if not judged:
            return Judgement("unclear")
        yes, _, supporting = max(judged, key=lambda each: (each[0], -len(each[2])))
        _, no, contradicting = max(judged, key=lambda each: (each[1], -len(each[2])))
        if yes >= max(self.support, no):
            return Judgement("yes", supporting)
        return Judgement("no", contradicting) if no >= self.conflict else Judgement("unclear", supporting)


class NoVerifier:
    """Stands where a verifier was configured that nobody opened: judging is a fault, never a guess by other means."""

    def __init__(self, judge: str) -> None:
        self._fault = VerifierFault(f"env.verification.judge={judge} needs a verifier from open_verifier")

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        return [self._fault] * len(documents)


def _passages(claim: str, text: str) -> dict[str, str]:
    """What the model reads, with the passage that is in it: the first sentence (which says what a document is about)
    stands before every later passage, for a name that stands there is a pronoun later."""
    sentences = split(text)
    terms = Analyser().terms
    wanted = frozenset(terms(claim))
    shared = [len(wanted.intersection(terms(sentence))) for sentence in sentences]
    nearest = sorted(range(len(sentences)), key=lambda at: -shared[at])[:SENTENCES]
    spans = {
        (max(0, at + before), min(len(sentences), at + after)) for at in nearest for before, after in BEFORE_AND_AFTER
    }
    passages: dict[str, str] = {}
    for begin, end in sorted(spans):
        passage = " ".join(sentences[begin:end])
        passages.setdefault(f"{sentences[0]} {passage}" if begin else passage, passage)
    return passages
