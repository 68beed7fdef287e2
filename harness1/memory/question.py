"""Analysis of a question: the names it mentions, and the words that show which relation it asks for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness1.memory.entities import FUNCTION_WORDS, extract
from harness1.memory.sentences import WORDS, okapi, tokens
from harness1.words import Remembered, has_foreign, normal, signed, spaced_out, stem, words

SCANNED_CHARACTERS = 8000  # characters of a text that are read for names and sentences
LONGEST_TITLE = 1000
MOST_TERMS = 60  # terms of a question that count; a set of them is a machine word
ARTICLE = 5  # characters before a name that a text begins with: room for an article or a bracket
STEM = 5  # letters that identify a word: director, directed and directing share them

RELATIONS = tuple(words for kind, words in WORDS.items() if kind.startswith("relation_"))

_LINK = "(?:of|the|and|or|in|on|to|for|at|with|a|an|my|de|la|&) "
_JOINED = re.compile(rf"\b[A-Z][\w'’.-]*(?:,? (?:{_LINK})*[A-Z0-9][\w'’.-]*)+")
_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w+)+\b")
_QUOTED = re.compile(r'["“「『《]([^"”」』》]{2,80})["”」』》]')
_SIDES = re.compile(
    r"(?:[,:]|\b[a-z]+) ([A-Z0-9][^,]*?),? (?:or|and) (?:[a-z]+ of [a-z]+ )?([A-Z0-9].*?)(?:,? [a-z]+[a-z ]*)?\?"
)

_BORDERS = re.compile(
    r"[,;:?]\s+|\s+(?:and|while|but|or|whereas|although|as opposed to|compared to|which|who|that|when|after|before|"
    r"because|with|where)\s+"
)
PART_TERMS, PART_SHARE, MOST_PARTS = 3, 0.8, 6  # a part has at least 3 terms and less than 80 % of all; at most 6
_POSSESSIVE = re.compile(r"['’][sS]\b")
_BARE = re.compile(r"[A-Za-z0-9]+(?: [A-Za-z0-9]+)*")
_BRACKETED = re.compile(r"\s*\([^)]*\)\s*$")
_DASH = re.compile(r"\s+[-–|]\s+")
_OPENING = "who whom whose what which when where why how is are was were do does did in of"
QUESTION_WORDS = frozenset(_OPENING.split())
_ARTICLES = frozenset(("the", "a", "an"))
_FIRST_FOREIGN = "\u0370"


class Question(NamedTuple):
    """What the question asks for, in the forms that units are compared with."""

    flat: str
    terms: dict[str, int]
    names: tuple[int, ...]
    relations: frozenset[str]


@lru_cache(maxsize=16384)
def normalise_name(text: str) -> str:
    """Return a name in lower case without accents, punctuation and possessive s, its words apart in any script."""
    return " ".join(_words(text))


@lru_cache(maxsize=16384)
def head(title: str) -> str:
    """Return what a title names: without bracketed detail, a section after a dash, and a leading article."""
    title = title[:LONGEST_TITLE]
    if _BARE.fullmatch(title):  # as most names are
        words = title.lower()
    else:
        bare = _BRACKETED.sub("", title)
        words = normalise_name(_DASH.split(bare)[0])
    first, _, rest = words.partition(" ")
    return rest if rest and first in _ARTICLES else words


def opening(text: str) -> str:
    """Return the name that a text begins with, as `head` returns it; empty if it begins otherwise."""
    first = next(iter(extract(text[:SCANNED_CHARACTERS], SCANNED_CHARACTERS)), "")
    return head(first) if first and text.find(first) <= ARTICLE else ""


def stems(words: list[str] | frozenset[str]) -> set[str]:
    """Return the crude stems of the content words."""
    return {word[:STEM] for word in words if word not in FUNCTION_WORDS}


def relation_stems(question: str) -> set[str]:
    """Return stems of the question's words, and of all words about the relations it names."""
    words = normalise_name(question).split()
    result = stems(words)
    for group in RELATIONS:
        if not group.isdisjoint(words):
            result |= stems(group)
    return result


def mentions(question: str) -> list[str]:
    """Return what a question names, most specific first: quotations, dotted names, names, sides of a choice, titles."""
    question = question[:SCANNED_CHARACTERS]  # the patterns take the square of the time for what no question is
    sides = _SIDES.search(question)
    found = [*_QUOTED.findall(question), *_IDENTIFIER.findall(question), *extract(question, len(question))]
    found += [*(sides.groups() if sides else ()), *_JOINED.findall(question)]
    distinct = {head(name): name.strip(" ,.'’") for name in reversed(found)}
    return [name for key, name in reversed(distinct.items()) if key and key not in FUNCTION_WORDS]


def parts(question: str) -> list[str]:
    """Return the clauses of a question that can be searched by themselves; none if there are not two."""
    question = question[:SCANNED_CHARACTERS]
    whole = len(set(content_terms(question)))
    found = [part.strip(" ,.?'\"") for part in _BORDERS.split(question)]
    sizes = {part: len(set(content_terms(part))) for part in found}
    apart = [part for part in sizes if PART_TERMS <= sizes[part] < PART_SHARE * whole]
    return apart[:MOST_PARTS] if len(apart) > 1 else []


def claim(question: str) -> str:
    """Turn a question into a statement that a document can support: drop its question mark and question words."""
    words = question.strip().rstrip("?").split()
    while len(words) > 3 and words[0].lower() in QUESTION_WORDS:
        words.pop(0)
    return " ".join(words)


def relatedness(text: str, name: str, relations: Set[str]) -> int:
    """Return the number of relation words within a clause of a name, at most 3."""
    start = max(0, text.find(name))
    end = start + len(name)
    near = _words(text[max(0, start - 60) : start])[-8:] + _words(text[end : end + 40])[:4]
    return min(3, len(stems([word for word in near if word[:STEM] in relations])))


@lru_cache(maxsize=256)
def read_question(query: str) -> Question:
    """Return the terms, names and relations of a question."""
    query = query[:SCANNED_CHARACTERS]
    terms = {term: at for at, term in enumerate(dict.fromkeys(content_terms(query)[:MOST_TERMS]))}
    names = tuple(mask for name in mentions(query) if (mask := term_mask(name, terms)))
    return Question(f" {normalise_name(query)} ", terms, names, frozenset(relation_stems(query)))


def likeness(query: str, question: Question) -> float:
    """Return the share of the question's terms that a query has."""
    if not question.terms:
        return 1.0
    return term_mask(query, question.terms).bit_count() / len(question.terms)


def term_mask(text: str, terms: Mapping[str, int]) -> int:
    """Return the terms of a text as a set of bits."""
    return mask_of(content_terms(text), terms)


def mask_of(found: Sequence[str], terms: Mapping[str, int]) -> int:
    """Return those of the terms that were found as a set of bits."""
    mask = 0
    for term in terms.keys() & found:
        mask |= 1 << terms[term]
    return mask


def content_terms(text: str) -> list[str]:
    """Return the stems of the words of a text, without function words."""
    found = words(text) if has_foreign(text) else [*tokens(normal(text)), *signed(text)]
    return [term for term in map(_TERMS.__getitem__, found) if term]


_TERMS = Remembered(
    lambda word: stem(word) if (len(word) > 1 or word >= _FIRST_FOREIGN) and word not in FUNCTION_WORDS else ""
)


def _words(text: str) -> list[str]:
    if "'" in text or "’" in text or "&" in text:
        text = _POSSESSIVE.sub("", text.replace("&amp;", "&"))
    if not text.isascii():
        text = "".join([letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter)])
    return tokens(spaced_out(text.replace("'", "").replace("’", "").replace("_", " ")))


def bits(masks: NDArray[np.int64], terms: int) -> NDArray[np.float64]:
    """Return sets of terms as rows of 0 and 1."""
    return ((masks[:, None] >> np.arange(terms)) & 1).astype(np.float64)


def by_relevance(passages: Sequence[str], question: str) -> list[int]:
    """Return the positions of a document's passages, those nearest to a question first: Okapi BM25 over stems."""
    scores = okapi([content_terms(passage) for passage in passages], content_terms(question[:SCANNED_CHARACTERS]))
    return sorted(range(len(passages)), key=lambda at: -scores[at])
