"""Turns text into terms, the same way for chunks and queries."""

from __future__ import annotations

import re
from array import array

from harness1.words import AUTO, STOP_WORDS, stemmer, words

ANALYSER = "words of 2 or more letters, lower case, Lucene's English stop words, Snowball English stemmer"
"""Names what `Analyser` does with no language, in the hash of an index: change both together."""
NO_TERM = -1
FOREIGN_SHARE = 0.01
_STOPPED = frozenset({"", "english", AUTO})
_WORD = re.compile(r"\w\w+")
_ASCII_WORDS = str.maketrans({code: " " for code in range(128) if not (chr(code).isalnum() or code == ord("_"))})
_SINGLE = frozenset(chr(code) for code in range(128))


class Analyser:
    """Turns a text into terms.

    Args:
        language: of Snowball, `none` or `auto`; it decides the stems, and all scripts are read (`harness1.words`).
            Empty: English, and runs of unspaced scripts stay whole, as in indexes made before there was a choice.
    """

    def __init__(self, language: str = "") -> None:
        self._stem = stemmer(language or "english")
        self._dropped = _SINGLE | STOP_WORDS if language in _STOPPED else _SINGLE
        self.language = language

    def words(self, text: str) -> list[str]:
        """Return all words in lower case. ASCII text, which splits three times as fast, also gives single letters."""
        if text.isascii():
            return text.lower().translate(_ASCII_WORDS).split()
        return words(text) if self.language else _WORD.findall(text.lower())

    def term(self, word: str) -> str | None:
        """Return the term of a word, or None for stop words and single letters of ASCII."""
        return None if word in self._dropped else self._stem(word)

    def terms(self, text: str) -> list[str]:
        return [term for word in self.words(text) if (term := self.term(word)) is not None]


def reads_by_script(foreign: int, chunks: int) -> bool:
    """Return what `auto` means for a corpus of so many chunks, `foreign` of them mostly in another script than Latin:
    True if all are stemmed by script, from 1 % on; False if a few exceptions are read as English like the rest."""
    return foreign > 0 and FOREIGN_SHARE * chunks <= foreign


class Vocabulary(dict[str, int]):
    """Numbers terms in order of appearance, and remembers the number of every word; words without a term have
    `NO_TERM`."""

    def __init__(self, analyser: Analyser) -> None:
        super().__init__()
        self._analyser = analyser
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
