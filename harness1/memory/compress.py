"""Sentence compression: shows only the sentences of a chunk that answer the query best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from math import log

from harness1.memory.sentences import split
from harness1.words import is_foreign, terms

K1, B, EPSILON = 1.5, 0.75, 0.25


def compress(text: str, query: str, k: int) -> str:
    """Return the `k` sentences of a text that match a query best, in text order, joined by a space.

    A text of at most `k` sentences is returned whole, stripped.
    """
    sentences = split(text)
    if len(sentences) <= k:
        return text.strip()
    return " ".join(sentences[position] for position in select(sentences, query, k))


def select(sentences: Sequence[str], query: str, k: int) -> tuple[int, ...]:
    """Return the positions, ascending, of the `k` sentences with the highest Okapi score. Ties go to the earlier
    sentence, so that a query without a match selects the first `k`.

    Words are what stands between spaces, or those of `harness1.words` in text that is mostly of another script than
    Latin.
    """
    cut = terms if is_foreign("".join(sentences)) else _by_spaces
    scores = okapi([cut(sentence) for sentence in sentences], cut(query))
    best = sorted(range(len(sentences)), key=[-score for score in scores].__getitem__)
    return tuple(sorted(best[: max(k, 0)]))


def _by_spaces(text: str) -> list[str]:
    return text.lower().split()


def okapi(documents: list[list[str]], query: list[str]) -> list[float]:
    """Return the Okapi BM25 score of every document, with the floor on negative idf (Trotman et al. 2014, "Improvements
    to BM25 and Language Models Examined", ATIRE variant).

    The statistics are those of these documents alone. Only query terms are scored, and terms are added in the order of
    the query, which gives the same floats as the `rank_bm25` package.
    """
    terms = frozenset(query)
    present = [terms.intersection(document) for document in documents]
    frequency = Counter(chain.from_iterable(present))
    scores = [0.0] * len(documents)
    if not frequency:
        return scores
    idf = {term: _idf(count, len(documents)) for term, count in frequency.items()}
    if min(idf.values()) < 0:
        floor = EPSILON * _mean_idf(documents)
        idf = {term: value if value >= 0 else floor for term, value in idf.items()}
    wanted = [term for term in query if term in idf]
    mean_length = sum(map(len, documents)) / len(documents)
    for position, document in enumerate(documents):
        found = present[position]
        if not found:
            continue
        counts = {term: document.count(term) for term in found}
        norm = K1 * (1 - B + B * len(document) / mean_length)
        score = 0.0
        for term in wanted:
            if term in found:
                score += idf[term] * (counts[term] * (K1 + 1) / (counts[term] + norm))
        scores[position] = score
    return scores


def _idf(count: int, documents: int) -> float:
    return log(documents - count + 0.5) - log(count + 0.5)


def _mean_idf(documents: list[list[str]]) -> float:
    """Return the mean idf of all terms, added in order of first appearance: `sum` compensates for rounding in some
    versions of Python, and a floor that differs in the last bit can change a selection."""
    frequency = Counter(chain.from_iterable(map(dict.fromkeys, documents)))
    idf = {count: _idf(count, len(documents)) for count in set(frequency.values())}
    total = 0.0
    for count in frequency.values():
        total += idf[count]
    return total / len(frequency)
