"""Turns text into terms, the same way for chunks and queries."""

from __future__ import annotations

import re
from array import array

import Stemmer

ANALYSER = "words of 2 or more letters, lower case, Lucene's English stop words, Snowball English stemmer"
"""Names the behaviour of `Analyser` in the hash of an index: change both together."""

STOP_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no",
    "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to",
    "was", "will", "with",
})  # fmt: skip
NO_TERM = -1
_WORD = re.compile(r"\w\w+")
_ASCII_WORDS = str.maketrans({code: " " for code in range(128) if not (chr(code).isalnum() or code == ord("_"))})


class Analyser:
    """Turns a text into terms."""

    def __init__(self) -> None:
        self._stem = Stemmer.Stemmer("english").stemWord

    def words(self, text: str) -> list[str]:
        """Return all words in lower case. ASCII text, which splits three times as fast, also gives single letters."""
        return text.lower().translate(_ASCII_WORDS).split() if text.isascii() else _WORD.findall(text.lower())

    def term(self, word: str) -> str | None:
        """Return the term of a word, or None for stop words and single letters."""
        return None if len(word) < 2 or word in STOP_WORDS else self._stem(word)

    def terms(self, text: str) -> list[str]:
        return [term for word in self.words(text) if (term := self.term(word)) is not None]


class Vocabulary(dict[str, int]):
    """Numbers terms in order of appearance, and remembers the number of every word; words without a term have
    `NO_TERM`."""

    def __init__(self) -> None:
        super().__init__()
        self._analyser = Analyser()
        self.terms: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        term = self._analyser.term(word)
        number = NO_TERM if term is None else self.terms.setdefault(term, len(self.terms))
        self[word] = number
        return number

    def number(self, text: str, into: array[int]) -> int:
        """Append the numbers of a text's words to an array of C ints, and return how many there are."""
        words = self._analyser.words(text)
        into.extend(map(self.__getitem__, words))
        return len(words)
