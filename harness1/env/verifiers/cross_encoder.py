"""Verification by a cross-encoder."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.env.verifiers.protocol import Judgement, VerifierFault
from harness1.memory.sentences import split
from harness1.records import UnitId
from harness1.retrieval.corpus import Analyser
from harness1.retrieval.cross_encoder import Pair, StanceScorer
from harness1.retrieval.sharing import Batcher
from harness1.words import AUTO, is_foreign

SENTENCES = 4
"""Number of sentences, with the most terms of the claim, that are read alone and with their neighbours."""
BEFORE_AND_AFTER = ((0, 1), (0, 2), (-1, 1), (-1, 2))
"""Start and end of the passages around such a sentence, of one to three sentences."""
ENGINE_ERRORS = (RuntimeError, ValueError, OSError)
"""Errors of a model: out of memory, a lost device, an output that is not a number."""


class CrossEncoderVerifier:
    """Judges the passages of a document by a model in a thread, in batches over all episodes.

    The verdict is `yes` if the best supporting passage is at least as probable as the best contradicting one, `no` if
    one contradicts (only for models with such a label), else `unclear`.

    Args:
        characters: how much of each document is read, from its beginning.
        window_s, size: the wait for a shared batch in seconds, and the pairs of a full one.
        support: the probability from which a passage supports.
        conflict: the probability from which a passage contradicts; higher, because entailment models also contradict
            unrelated texts.
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
        """Judge each document; if the model fails, return a fault for each."""
        passages = [_passages(claim, text[: self.characters]) for _, text in documents]
        pairs = [(claim, text) for texts in passages for text in texts]
        try:
            stances = iter(await self._batcher.submit(pairs))
        except ENGINE_ERRORS as error:
            return [VerifierFault(f"cross-encoder: {type(error).__name__}: {error}") for _ in documents]
        return [self._judge([(*next(stances), shown) for shown in texts.values()]) for texts in passages]

    def _stances(self, pairs: list[Pair]) -> list[tuple[float, float]]:
        return [(yes, no) for yes, no in self._scorer.stances(pairs).tolist()]

    def _judge(self, judged: Sequence[tuple[float, float, str]]) -> Judgement:
        """Judge a document by the probabilities of its passages (support, contradiction); ties go to the shortest."""
        if not judged:
            return Judgement("unclear")
        yes, _, supporting = max(judged, key=lambda each: (each[0], -len(each[2])))
        _, no, contradicting = max(judged, key=lambda each: (each[1], -len(each[2])))
        if yes >= max(self.support, no):
            return Judgement("yes", supporting)
        return Judgement("no", contradicting) if no >= self.conflict else Judgement("unclear", supporting)


def _passages(claim: str, text: str) -> dict[str, str]:
    """Return the texts that the model reads, each with its passage. The first sentence, which names the subject, is put
    before later passages, because they refer to it by pronouns."""
    sentences = split(text)
    terms = Analyser(AUTO if is_foreign(text) else "").terms
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
