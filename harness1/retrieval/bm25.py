"""BM25 over chunks: built by bm25s, searched directly in its arrays.

The score of a chunk is the sum over the terms of the query, each as often as it occurs there, of

    ln(1 + (N - n + 0.5) / (n + 0.5)) * f / (f + k1 * (1 - b + b * length / mean length))

with N chunks in all, n of them with the term, and f occurrences in this one: Lucene's variant, exact lengths
(Kamphuis et al., "Which BM25 do you mean?", ECIR 2020; Lu, "BM25S", arXiv 2407.03618).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
import Stemmer

from harness1.retrieval.ordering import best_positions
from harness1.retrieval.strings import Keys, load_array, write_keys

ANALYSER = "words of 2 or more letters, lower case, Lucene's English stop words, Snowball English stemmer"
"""Names what `Analyser` does, for the hash of an index: whoever changes one changes the other."""

STOP_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no",
    "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to",
    "was", "will", "with",
})  # fmt: skip
_WORD = re.compile(r"\b\w\w+\b")


class Analyser:
    """Turns a text into terms, the same way for chunks and queries."""

    def __init__(self) -> None:
        self._stem = Stemmer.Stemmer("english").stemWord

    def words(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())

    def term(self, word: str) -> str | None:
        """The term of a word; a stop word has none."""
        return None if word in STOP_WORDS else self._stem(word)

    def terms(self, text: str) -> list[str]:
        return [term for word in self.words(text) if (term := self.term(word)) is not None]


class BM25Builder:
    """Takes the texts of all chunks in their order, then writes the index of them."""

    def __init__(self) -> None:
        self._analyser = Analyser()
        self._term_ids: dict[str, int] = {}
        self._word_ids: dict[str, int | None] = {}
        self._chunks: list[list[int]] = []

    def add(self, text: str) -> None:
        known = self._word_ids
        ids = (known[word] if word in known else self._learn(word) for word in self._analyser.words(text))
        self._chunks.append([number for number in ids if number is not None])

    def write(self, folder: Path, k1: float, b: float) -> None:
        """Write the terms and, for each term, its chunks with their scores (compressed sparse columns)."""
        import bm25s  # slow to import, and searching does not need it

        write_keys(folder, "terms", list(self._term_ids))
        if self._term_ids:
            model = bm25s.BM25(method="lucene", k1=k1, b=b)
            model.index((self._chunks, self._term_ids), create_empty_token=False, show_progress=False)
            scores, chunks, starts = (model.scores[name] for name in ("data", "indices", "indptr"))
        else:
            scores, chunks, starts = np.empty(0), np.empty(0), np.zeros(1)
        np.save(folder / "bm25.scores.npy", scores.astype(np.float32))
        np.save(folder / "bm25.chunks.npy", chunks.astype(np.int32))
        np.save(folder / "bm25.starts.npy", starts.astype(np.int64))

    def _learn(self, word: str) -> int | None:
        term = self._analyser.term(word)
        number = None if term is None else self._term_ids.setdefault(term, len(self._term_ids))
        self._word_ids[word] = number
        return number


class BM25:
    """The memory-mapped index of one folder.

    Args:
        ranks: for each chunk, the place of its id among all ids in lexicographic order; it decides among equals.
    """

    def __init__(self, folder: Path, ranks: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        self._analyser = Analyser()
        self._terms = Keys(folder, "terms")
        self._scores = load_array(folder / "bm25.scores.npy")
        self._chunks = load_array(folder / "bm25.chunks.npy")
        self._starts = load_array(folder / "bm25.starts.npy")
        self._ranks = ranks

    def search(self, query: str, k: int, exclude: Collection[int] = ()) -> list[tuple[int, float]]:
        """Positions of the best `k` chunks with their scores, in the total order (`harness1.retrieval.ordering`).

        A chunk without a term of the query is never among them. Excluded chunks (by position) take no part: the top
        score, which the order is relative to, is that of the others.
        """
        scores = np.zeros(len(self._ranks), dtype=np.float32)
        terms = [term for term in self._terms.find(self._analyser.terms(query)) if term >= 0]
        if terms:
            columns = [slice(self._starts[term], self._starts[term + 1]) for term in terms]
            chunks = np.concatenate([self._chunks[column] for column in columns])
            np.add.at(scores, chunks, np.concatenate([self._scores[column] for column in columns]))
        if exclude:
            scores[list(exclude)] = 0.0
        best = best_positions(scores, self._ranks, k)
        return list(zip(best.tolist(), scores[best].tolist(), strict=True))
