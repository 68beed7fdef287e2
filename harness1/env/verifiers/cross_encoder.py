"""Verification by a cross-encoder."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.env.verifiers.protocol import Judgement, VerifierFault
from harness1.memory.sentences import split
from harness1.records import UnitId
from harness1.retrieval.analyser import Analyser
from harness1.retrieval.batching import Batcher
from harness1.retrieval.dense.cross_encoder import Pair, StanceScorer

SENTENCES = 4
"""Of a document, so many sentences with the most terms of the claim are read, alone and with their neighbours."""
BEFORE_AND_AFTER = ((0, 1), (0, 2), (-1, 1), (-1, 2))
"""Where passages begin and end, seen from such a sentence: one to three sentences."""
ENGINE_ERRORS = (RuntimeError, ValueError, OSError)
"""What a model may raise: no memory, a device that is gone, an output that is no number."""


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
