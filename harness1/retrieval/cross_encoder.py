"""Cross-encoders: models that read two texts together, for reranking and for verifying claims.

The score of a pair is the same, bit for bit, in any batch. Products of different shapes round differently, so a pair is
scored alone, or with a fixed number of others padded to one length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness1 import config
from harness1.errors import ConfigError, UsageError
from harness1.model_folder import folder_hash, model_folder
from harness1.plain import utf8_safe
from harness1.records import Chunk
from harness1.retrieval.embedder import loading
from harness1.retrieval.protocol import Scored, total_order

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder


ROWS, STEP = 32, 32
"""On devices other than the CPU: pairs in a pass, and the multiple of tokens to which they are padded. On the CPU,
passes of several pairs gain nothing: 64 pairs of up to 220 words took 2.2 s alone and 1.9 to 3.8 s in fixed shapes."""
ENTAILMENT = frozenset({"entailment", "supports"})
AFFIRMATION = frozenset({"yes", "1", "label_1"})
CONTRADICTION = frozenset({"contradiction", "refutes"})
MOST_LABELS = 3
SMALLEST, LARGEST = 1e-30, 1.0 - 2.0**-24
"""The range of probabilities whose log odds are finite and distinct as 32-bit numbers."""

Pair = tuple[str, str]


def open_cross_encoder(machine: config.Machine) -> TransformerScorer:
    """Open the cross-encoder at `machine.reranker` on `machine.device`; the last one stays loaded and is shared. Raises
    ConfigError: none is named; MissingExtra; UsageError: it does not load, or has no label for support."""
    if not machine.reranker:
        raise ConfigError("a cross-encoder is needed: give its name or folder with --set machine.reranker=NAME")
    return _load(machine.reranker, machine.device, machine.threads)


@lru_cache(maxsize=1)
def _load(spec: str, device: str, threads: int) -> TransformerScorer:
    folder = model_folder(spec)
    with loading(folder, "cross-encoder", config.Machine(device=device, threads=threads)):
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(folder), device=device or None, local_files_only=True)
    rows, step = (1, 1) if model.device.type == "cpu" else (ROWS, STEP)
    return TransformerScorer(model, folder_hash(folder), rows, step)


class TransformerScorer:
    """A `CrossEncoder` of sentence-transformers, one pass at a time in any thread. A pass has `rows` pairs, padded to a
    multiple of `step` tokens. Raises UsageError: the model has more than three labels, or none that means support."""

    def __init__(self, model: CrossEncoder, identity: str, rows: int, step: int) -> None:
        self.hash = identity
        self._model, self._rows, self._step = model, rows, step
        self._lock = Lock()
        self._supports, self._contradicts, self._text_first = _labels(model)

    def score(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Return the probability of each pair that the text answers or supports, independent of the other pairs."""
        return self.stances(pairs)[:, 0]

    def stances(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Return both labels of an entailment model, which reads the text first, or else the one of relevance. Raises
        ValueError: the scores are not numbers; RuntimeError: torch failed."""
        found = np.zeros((len(pairs), 2), dtype=np.float32)
        read = [(utf8_safe(one), utf8_safe(other)) for one, other in pairs]
        if self._text_first:
            read = [(text, claim) for claim, text in read]
        members: dict[int, list[int]] = defaultdict(list)
        """Pairs by the number of tokens to which they are padded."""
        with self._lock:
            longest = self._model.max_seq_length
            lengths = self._model.preprocess(read)["attention_mask"].sum(dim=1).tolist() if read else []
            for at, tokens in enumerate(lengths):
                padded = -(-tokens // self._step) * self._step
                members[min(padded, longest) if longest else padded].append(at)
            for length, alike in members.items():
                for start in range(0, len(alike), self._rows):
                    part = alike[start : start + self._rows]
                    full = part + part[-1:] * (self._rows - len(part))
                    chances = self._forward([read[at] for at in full], length)[: len(part)]
                    found[part, 0] = chances[:, self._supports]
                    if self._contradicts is not None:
                        found[part, 1] = chances[:, self._contradicts]
        return found

    def _forward(self, pairs: list[Pair], length: int) -> NDArray[np.float32]:
        from torch.nn import Identity

        text = {"padding": "max_length", "max_length": length}
        shape: Any = {"batch_size": len(pairs), "processing_kwargs": {"text": text}}
        outputs = self._model.predict(pairs, show_progress_bar=False, activation_fn=Identity(), **shape)
        logits = np.asarray(outputs, dtype=np.float64).reshape(len(pairs), -1)
        if not np.isfinite(logits).all():
            raise ValueError("the cross-encoder gives scores that are not numbers")
        # The sigmoid for one label; for several the softmax, which is the sigmoid of each against all others.
        if logits.shape[1] == 1:
            logits = np.hstack([logits, np.zeros_like(logits)])
        chances: NDArray[np.float32] = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype("f4")
        return chances


def _labels(model: CrossEncoder) -> tuple[int, int | None, bool]:
    """Return the labels of support and, if there is one, of contradiction, and whether the model reads the text
    first."""
    count = model.num_labels
    if count == 1:
        return 0, None, False
    labels = dict(model.config.id2label or {}) if model.config else {}
    names = [str(name).lower() for _, name in sorted(labels.items(), key=lambda label: int(label[0]))]

    def place(wanted: Container[str]) -> int | None:
        return next((at for at, name in enumerate(names) if name in wanted), None)

    entails = place(ENTAILMENT)
    supports = place(AFFIRMATION if count == 2 else {"yes"})
    supports = supports if entails is None else entails
    if count > MOST_LABELS or supports is None:
        need = "a cross-encoder must have one label, or two or three with one called entailment or yes"
        raise UsageError(f"machine.reranker: {need}; this one has {count}: {', '.join(names)}")
    return supports, place(CONTRADICTION), entails is not None


def rerank(
    queries: Sequence[str], rankings: Sequence[Sequence[Chunk]], scorer: TransformerScorer, candidates: int
) -> list[list[Scored]]:
    """Return all chunks of each query's ranking, rescored, best first, in the total order. The first `candidates` are
    scored by title, line break and text, all in one call, equal pairs once: by log odds, which keep values near 0 and 1
    distinct. The others follow in their earlier order, each 1 below the one before."""
    read = [
        [(query, f"{chunk.title}\n{chunk.text}") for chunk in chunks[:candidates]]
        for query, chunks in zip(queries, rankings, strict=True)
    ]
    pairs = list(dict.fromkeys(chain.from_iterable(read)))
    chances = np.clip(scorer.score(pairs).astype(np.float64), SMALLEST, LARGEST) if pairs else np.empty(0)
    odds = dict(zip(pairs, (np.log(chances) - np.log1p(-chances)).tolist(), strict=True))
    reranked = []
    for chunks, each in zip(rankings, read, strict=True):
        scores = {chunk.chunk_id: odds[pair] for chunk, pair in zip(chunks, each, strict=False)}
        by_id, lowest = {chunk.chunk_id: chunk for chunk in chunks}, min(scores.values(), default=0.0)
        behind = [Scored(chunk, lowest - place) for place, chunk in enumerate(chunks[len(each) :], start=1)]
        reranked.append([Scored(by_id[name], score) for name, score in total_order(scores.items())] + behind)
    return reranked
