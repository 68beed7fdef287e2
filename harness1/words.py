"""The words of a text in any script, as search and the working memory compare them.

Scripts without spaces between words, and Korean, whose particles are attached to words, are cut into overlapping pairs
of characters: `東京都` gives `東京` and `京都`. Pairs need no dictionary, find a word wherever it stands in a longer
run, and rank about as well as words do (Nie et al., "On the use of words and n-grams for Chinese information
retrieval", IRAL 2000). Han characters and Korean syllables, many of which are words, are also words by themselves;
others only where they stand alone. A character is a letter with the vowel signs and tone marks that belong to it.

What is written together is one word and its parts: `ORA-00942` gives `ora-00942`, `ora` and `00942`. Hyphens between
words of letters and numbers of two digits only separate them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import TypeVar

import Stemmer

AUTO, NONE = "auto", "none"  # stemming each word by its script, and no stemming
STOP_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no",
    "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to",
    "was", "will", "with",
})  # fmt: skip

_MARKS = "".join(
    chr(code)
    for block in (range(0x300, 0x1D00), range(0x3099, 0x309B), range(0xA800, 0xAC00))
    for code in block
    if unicodedata.category(chr(code)).startswith("M")
)
"""Vowel signs, tone marks and accents, which `\\w` does not match."""
_UNSPACED = (
    "\u0e01-\u0e3a\u0e40-\u0e4e"  # Thai
    "\u0e81-\u0ec8\u0ec9-\u0ece\u0edc-\u0edf"  # Lao
    "\u1000-\u103f\u1050-\u108f\u109a-\u109d\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa7f"  # Myanmar
    "\u1780-\u17d3\u17d7\u17dc\u17dd"  # Khmer
    "\u3005-\u3007\u3021-\u3029\u3031-\u3035\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\u3041-\u3096\u3099\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # Hiragana and Katakana
    "\u3105-\u312f\u31a0-\u31bf"  # Bopomofo
    "\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7a3\ud7b0-\ud7fb"  # Hangul
)
_FOREIGN = (
    "^\x00-\u036f\u1d00-\u1eff\u2000-\u2bff\u2c60-\u2c7f\u2e00-\u2e7f\ua700-\ua7ff\uab30-\uab6f\ud800-\uf8ff\ufb00-\ufb06"
    "\ufe00-\ufe2f\ufeff\ufff0-\uffff\U0001d000-\U0001dfff\U0001f000-\U0001ffff\U000e0000-\U0010ffff"
)  # all but Latin, what scripts share, and what is no letter; full and half widths are among the other scripts
_STEMMED = (
    ("\u0370", "\u0400", "greek"),
    ("\u0400", "\u0530", "russian"),
    ("\u0530", "\u0590", "armenian"),
    ("\u0600", "\u0780", "arabic"),
    ("\u0900", "\u0980", "hindi"),
    ("\u0b80", "\u0c00", "tamil"),
    ("\u1f00", "\u2000", "greek"),
)  # first letters of the words that a stemmer takes, and the first that it does not

_FOREIGN_RUN = re.compile(f"[{_FOREIGN}]+")
_RUN = re.compile(f"([{_UNSPACED}]+)")
_CHARACTER = re.compile(f".[{_MARKS}]*", re.DOTALL)
_SYLLABLE = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\uac00-\ud7a3]")
_SEPARATORS = re.compile(r"(\W{30})\W+")
_LEFT_OUT = re.compile(
    "[\u00ad\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0670\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufe00-\ufe0f\ufeff"
    "\U000e0100-\U000e01ef]"
)
"""What one writer sets and another leaves out: stress, the points of Hebrew and Arabic, and invisible characters."""

_COMMON = re.compile(r"[\"'(\[]*([A-Za-z][a-z]+|[A-Z]{2,}|[0-9]{2,})(?:'s)?[\"')\],.;:!?]*")
"""Most pieces of English text, which have one word."""
_WORD = rf"\w[\w{_MARKS}]*(?:\+\+|#)?"
_WRITTEN = re.compile(rf"(?:(?<![\w.)])\.(?=[^\W\d_]))?{_WORD}(?:[.-]{_WORD})*")
_PLAIN = re.compile(r"(?:[^\W\d_]{2,}|\d\d)(?:-(?:[^\W\d_]{2,}|\d\d))*")
"""What its parts tell as well: as words of their own, `covid-19` and the like outweigh the others of a question."""
_PART = re.compile(rf"[^\W_](?:[^\W_]|[{_MARKS}])*")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})")
_NUMBER = re.compile(r"\d+(?:\.\d+)+")
_SIGN = re.compile(r"\+\+|(?<=\w)#|(?<![\w.)])\.(?=[^\W\d_])|\d\.\d")
_SIGNED = re.compile(r".*(?:\+\+|#)|\.\w+|\d+(?:\.\d+)+")
_LINE_END = re.compile(r"[-\u00ad\u2010][ \t]*\r?\n")
_BROKEN = re.compile(rf"(?<![^\W\d_])([^\W\d_]++){_LINE_END.pattern}[ \t]*([^\W\d_]++)")
LONGEST = 64
"""Characters of what is written together, from which on only its parts are words; and of what is remembered."""

T = TypeVar("T")


def has_foreign(text: str) -> bool:
    """Return whether a text has a letter of another script than Latin."""
    return not _is_western(text) and _FOREIGN_RUN.search(text) is not None


def is_foreign(text: str) -> bool:
    """Return whether most letters of a text are of other scripts than Latin; their vowel signs count as letters."""
    if _is_western(text):
        return False
    foreign = sum(map(len, _FOREIGN_RUN.findall(text)))
    return foreign > 0 and 2 * foreign > sum(map(str.isalpha, text))


def _is_western(text: str) -> bool:
    """Return True for texts in the usual Western characters, three times as fast as the expression can tell."""
    try:
        return text.isascii() or bool(text.encode("cp1252"))
    except UnicodeEncodeError:
        return False


def normal(text: str) -> str:
    """Return a text without what does not count: forms that Unicode calls compatible (full and half widths, ligatures,
    letters with separate accents) are the same (NFKC); stress marks, points and invisible characters are left out."""
    if text.isascii():
        return text
    text = _SEPARATORS.sub(r"\1", text)  # a long run of accents would take the square of the time
    return _LEFT_OUT.sub("", unicodedata.normalize("NFKC", text).replace("İ", "I").replace("\u2010", "-"))


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, and the pairs of characters of unspaced scripts; single letters of
    ASCII and single digits are words only within longer ones."""
    return [*chain.from_iterable(map(words_of, pieces(text)))]


def pieces(text: str) -> list[str]:
    """Return what stands between white space; what is hyphenated over the end of a line stands with its hyphen and
    without."""
    if "\n" in text and _LINE_END.search(text):
        text = _BROKEN.sub(r"\1-\2 \1\2", text)
    return text.split()


def words_of(piece: str, *, inner: bool = False) -> list[str]:
    """Return the words of a piece of text without white space; `inner`: also those within words, as `humps` does."""
    if common := _COMMON.fullmatch(piece):
        return [common[1].lower()]
    found: list[str] = []
    for at, part in enumerate(_RUN.split(normal(piece))):
        if at % 2:
            found += _pairs(part)
        else:
            for written in _WRITTEN.findall(part):
                found += _parts(written)
    return [*found, *humps(piece)] if inner else found


def humps(piece: str) -> list[str]:
    """Return the words within the words of a piece that capitals mark: `http` and `server` of `HTTPServer`. A text has
    them, a query for `TechCrunch` does not: it would ask three times for the name, and not for its other words."""
    if not _HUMP.search(piece):
        return []
    split = (_HUMP.split(part) for part in _PART.findall(normal(piece)))
    return [hump.lower() for parts in split if len(parts) > 1 and min(map(len, parts)) > 1 for hump in parts]


def signed(text: str) -> list[str]:
    """Return the words of a text that runs of letters and digits do not tell: `C++`, `C#`, `.NET` and `2.14.3`."""
    return [*filter(_SIGNED.fullmatch, words(text))] if _SIGN.search(text) else []


def _pairs(run: str) -> list[str]:
    characters = run if run.isalnum() else _CHARACTER.findall(run)
    if len(characters) == 1:
        return [run]
    return [*(first + second for first, second in pairwise(characters)), *_SYLLABLE.findall(run)]


def _parts(written: str) -> Iterator[str]:
    """Yield the words of what is written together: the whole, the versions that a number begins with, and the parts."""
    parts: list[str] = _PART.findall(written)
    found: Iterable[str] = parts
    if parts and len(written) <= LONGEST and not _PLAIN.fullmatch(written):
        versions = (accumulate(number.split("."), "{}.{}".format) for number in _NUMBER.findall(written))
        found = dict.fromkeys([written, *chain.from_iterable([*steps][1:] for steps in versions), *parts])
    for word in found:
        if len(word) > 1 or word > "\x7f":
            yield word.lower()


def terms(text: str) -> list[str]:
    """Return the stem of every word of a text, by its script."""
    return list(map(stem, words(text)))


def spaced_out(text: str) -> str:
    """Return a text with spaces around each character of a script that puts none between words."""
    return text if text.isascii() else _RUN.sub(lambda run: f" {' '.join(run[0])} ", text)


def stemmer(language: str) -> Callable[[str], str]:
    """Return the function that stems words of a language of Snowball; `AUTO` and `NONE` are languages too."""
    if language == AUTO:
        return stem
    return str if language == NONE else _snowball(language)


def languages() -> list[str]:
    """Return the languages that Snowball stems."""
    return sorted(Stemmer.algorithms())


@cache
def _snowball(language: str) -> Callable[[str], str]:
    return Remembered(Stemmer.Stemmer(language).stemWord).__getitem__


class Remembered(dict[str, T]):
    """What a function returns for strings: a plain dictionary, which is read without being written as `lru_cache`
    is."""

    MOST = 1 << 17

    def __init__(self, function: Callable[[str], T]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, key: str) -> T:
        if len(self) >= self.MOST:
            self.clear()
        found = self._function(key)
        if len(key) <= LONGEST:
            self[key] = found
        return found


def _stem(word: str) -> str:
    if word < "\u0370":
        return _snowball("english")(word)
    for first, after, language in _STEMMED:
        if first <= word < after:
            return _snowball(language)(word)
    return word


stem: Callable[[str], str] = Remembered(_stem).__getitem__
"""Returns the stem of a word by its first letter: Latin as English, Cyrillic as Russian; some scripts have none."""
