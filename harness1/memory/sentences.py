"""Sentences: where they end, and which of them answer a query best."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import resources
from itertools import chain
from math import log

import msgspec

from harness1.words import has_foreign, is_foreign, normal, signed, terms

LONGEST = 600  # characters after which text without a border is cut at white space: tables and lists need borders too

UPPER = "".join(letter for letter in map(chr, range(0x80, 0x2000)) if letter.isupper())
"""The upper-case letters of Latin, Greek, Cyrillic, Armenian and Georgian beyond ASCII, for a character class."""


WORDS = {
    kind: frozenset(words.split())
    for kind, words in msgspec.toml.decode(
        resources.files(__package__).joinpath("words.toml").read_bytes(), type=dict[str, str]
    ).items()
}
"""The word lists of `words.toml`."""

_TOKEN = re.compile(r"\w+")
_BORDER = re.compile(rf"([.!?][\"'”’)\]]?)\s++(?=[\"'“‘(\[]?[A-Z0-9{UPPER}])")
_UNCASED = "\u0590-\u109f\u10d0-\u1cff\u2e80-\ua63f\ua800-\uab2f\uab70-\ud7ff\uf900-\ufaff\ufb1d-\ufdff"
"""Letters of scripts without capitals."""
_FOREIGN_BORDER = re.compile(
    rf"([.!?][\"'”’)\]]?)\s++(?=[\"'“‘(\[]?[A-Z0-9{UPPER}{_UNCASED}])|([。｡！？؟۔।॥።։។။]++[\"'”’)\]」』）】》]*+)\s*+"
)
_PIECE = re.compile(rf"\S(?:.{{0,{LONGEST - 2}}}\S)?(?!\S)|\S++", re.DOTALL)
_INITIALS = re.compile(r"(?:[^\W\d_]\.)+")
_OPENING = "\"'“‘(["
_ABBREVIATIONS, _BEFORE_NUMBERS = WORDS["abbreviations"], WORDS["before_numbers"]
_LONGEST_ABBREVIATION = 12
_LONGEST_WORD = 7  # letters of a word that is longer than any abbreviation


def table(kept: Callable[[str], bool]) -> bytes:
    """Return the table for `runs` of these ASCII characters: a space for all others, and what is not ASCII as it is."""
    return bytes(code if code >= 128 or kept(chr(code)) else ord(" ") for code in range(256))


def runs(text: str, kept: bytes, pattern: re.Pattern[str]) -> list[str]:
    """Return what `pattern.findall` finds; bytes are cut five times as fast, so it reads only what is not ASCII."""
    if text.isascii():
        return text.encode().translate(kept).decode().split()
    pieces = text.encode("utf-8", "surrogatepass").translate(kept).decode("utf-8", "surrogatepass").split()
    return [run for piece in pieces for run in ((piece,) if piece.isascii() else pattern.findall(piece))]


def tokens(text: str) -> list[str]:
    """Return the runs of letters, digits and underscores of a text in lower case."""
    return runs(text.lower(), _WORD_CHARACTERS, _TOKEN)


_WORD_CHARACTERS = table(lambda character: character.isalnum() or character == "_")


@lru_cache(maxsize=1024)
def split(text: str) -> tuple[str, ...]:
    """Cut a text into its sentences, without the white space between them, in linear time. A sentence ends at a
    newline, and at white space between `.`, `!` or `?` (with an optional closing quote or bracket) and an upper-case
    letter or digit, unless an abbreviation or an initial precedes. In a text that is mostly of another script than
    Latin, it also ends after the full stops of that script, and before letters without case. Stretches longer than
    `LONGEST` characters are cut at white space."""
    pieces: list[str] = []
    borders = _FOREIGN_BORDER if is_foreign(text) else _BORDER
    for line in text.splitlines():
        line = line.strip()
        start = 0
        for border in borders.finditer(line):
            end = border.end(border.lastindex or 0)
            if not _abbreviates(line, end, border.end()):
                pieces.append(line[start:end])
                start = border.end()
        if start < len(line):
            pieces.append(line[start:])
    if any(len(piece) > LONGEST for piece in pieces):
        return tuple(part for piece in pieces for part in _PIECE.findall(piece))
    return tuple(pieces)


def _abbreviates(line: str, end: int, following: int) -> bool:
    letters = end - 1 - _LONGEST_WORD
    if line[end - 1] != "." or (letters >= 0 and line[letters : end - 1].isalpha()):
        return False
    start = max(0, end - _LONGEST_ABBREVIATION)
    word = line[max(start, line.rfind(" ", start, end) + 1) : end].lstrip(_OPENING)
    lowered = word.lower()
    if lowered in _ABBREVIATIONS or (word[1:2] == "." and _INITIALS.fullmatch(word)):
        return True
    return lowered in _BEFORE_NUMBERS and line[following].isdigit()


K1, B, EPSILON = 1.5, 0.75, 0.25


def compress(text: str, query: str, k: int) -> str:
    """Return the `k` sentences of a text that match a query best, in text order, joined by a space."""
    sentences = split(text)
    if len(sentences) <= k:
        return text.strip()
    return " ".join(sentences[position] for position in select(sentences, query, k))


def select(sentences: Sequence[str], query: str, k: int) -> tuple[int, ...]:
    """Return the positions, ascending, of the `k` sentences with the highest Okapi score, the earlier of equals. Words
    are what stands between spaces; or those of `harness1.words` where that says little: for signs and letters of other
    scripts in the query, and in text that is mostly of another script than Latin."""
    cut = terms if has_foreign(query) or signed(query) or is_foreign("".join(sentences)) else _between_spaces
    scores = okapi([cut(sentence) for sentence in sentences], cut(query))
    best = sorted(range(len(sentences)), key=[-score for score in scores].__getitem__)
    return tuple(sorted(best[: max(k, 0)]))


def _between_spaces(text: str) -> list[str]:
    return normal(text).lower().split()


def okapi(documents: list[list[str]], query: list[str]) -> list[float]:
    """Return the Okapi BM25 score of every document, with the floor on negative idf (Trotman et al. 2014, "Improvements
    to BM25 and Language Models Examined", ATIRE variant) and the statistics of these documents alone. Terms are added
    in the order of the query, which gives the same floats as the `rank_bm25` package."""
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
    """Return the mean idf of all terms, added in order of first appearance: `sum` rounds otherwise in some versions of
    Python, and a floor that differs in the last bit can change a selection."""
    frequency = Counter(chain.from_iterable(map(dict.fromkeys, documents)))
    idf = {count: _idf(count, len(documents)) for count in set(frequency.values())}
    total = 0.0
    for count in frequency.values():
        total += idf[count]
    return total / len(frequency)
