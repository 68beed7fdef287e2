"""What a text has in common with a claim and where it turns against it, as numbers for a fitted verifier.

The first sentence of a text, often the title, is its subject: what it names counts as present in every sentence,
because later ones refer to it by pronouns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

import msgspec
import numpy as np

from harness1.env.verifiers.numbers import NUMBER_WORDS, read_numbers
from harness1.memory.dedup import MONTHS
from harness1.memory.entities import FUNCTION_WORDS, extract
from harness1.memory.sentences import WORDS, split
from harness1.records import Record
from harness1.words import stemmer

NEAREST = 3
"""Sentences that are compared by embeddings."""
COMMON_WEIGHT = 0.6
"""Weight of a term that is a common word; that of others is 1."""
DENIAL_REACH = 3
"""Words before an opposite in which a denial turns it round."""
LONG = 12
"""Sentences from which a text counts as long."""
MOST = 3
"""Numbers, opposites and the like beyond these add nothing."""


class _Turning(Record):
    denials: str
    opposites: tuple[str, ...]


class Sentence(NamedTuple):
    """A sentence as the features see it."""

    text: str
    stems: tuple[str, ...]
    terms: Mapping[str, float]
    """Stems of the content words, with their weights."""
    names: frozenset[str]
    numbers: frozenset[tuple[str, str]]
    denials: int
    turns: tuple[tuple[int, int, int], ...]
    """Words that have opposites: (number of the pair, side 1 or -1, position). A denial shortly before changes the
    side."""


class Features(Record):
    """How a text compares with a claim; "best" is the sentence that covers most of the claim."""

    best_cover: float
    """Share of the claim's terms in the best sentence."""
    subject_cover: float
    """The same share in the subject."""
    best_and_subject_cover: float
    text_cover: float
    top_cover: float
    """Mean share of the three sentences that cover most."""
    prefixes: float
    """Share of the claim's terms whose first four letters the best sentence or the subject has."""
    precision: float
    """Share of the terms of the best sentence that the claim has."""
    missing: float
    """Terms of the claim that the subject and the two best sentences lack."""
    names_missing: float
    """Share of the claim's names that the best sentence and the subject lack."""
    names_missing_in_text: float
    numbers: float
    """Numbers of the claim."""
    numbers_equal: float
    numbers_missing: float
    """Numbers of the claim that the best sentence lacks."""
    numbers_missing_in_text: float
    number_rival: float
    """1 if the best sentence has another number of the kind of one that it lacks."""
    numbers_new: float
    claim_denies: float
    """1 if the claim denies and the best sentence does not."""
    best_denies: float
    both_deny: float
    denied_claim: float
    """Share of denying sentences, weighted by the square of their cover, if the claim denies; else 0."""
    denied_text: float
    """The same share if the claim does not deny; else 0."""
    parity: float
    """1 if the sentences deny as the claim does, -1 if not, weighted likewise; 0 where opposites decide."""
    opposed: float
    """Words of the claim of which the best sentence has an opposite, and not the word itself."""
    agreed: float
    best_stance: float
    """Sum of `stance` for the best sentence."""
    stance: float
    """Words with opposites that take the same side as in the claim, less those that take the other; those near words
    of the claim count most. Weighted over all sentences likewise."""
    claim_words: float
    sentences: float


NAMES = Features.__struct_fields__


def read(text: str) -> Sentence:
    """Analyse a sentence, or a claim."""
    lowered = text.lower()
    words = _TOKEN.findall(lowered)
    stems = _stem(words)
    terms = {
        stem: COMMON_WEIGHT if word in WORDS["common"] else 1.0
        for word, stem in zip(words, stems, strict=True)
        if len(word) > 1 and word not in _CONTENTLESS
    }
    names = frozenset(_stem(_TOKEN.findall(" ".join(extract(text, len(text))).lower()))) & terms.keys()
    denying = [word in _DENIALS for word in words]
    denials = sum(denying) + lowered.count("n't") + lowered.count("n’t")
    return Sentence(text, stems, terms, names, read_numbers(lowered, words), denials, tuple(_turns(stems, denying)))


def split_subject(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the first sentence of a text, and the others; a text of one sentence is its own subject."""
    sentences = split(text) or ("",)
    return sentences[0], sentences[1:] or sentences


def nearest(claim: Sentence, sentences: Sequence[Sentence]) -> list[int]:
    """Return the places of the sentences that cover most of a claim, best first; short ones first if equal."""
    covers = [cover(claim, each.terms) + 0.3 * len(claim.numbers & each.numbers) for each in sentences]
    return sorted(range(len(sentences)), key=lambda at: (-covers[at], len(sentences[at].text)))


def cover(claim: Sentence, present: Collection[str]) -> float:
    """Return the share of the claim's terms, by weight, that are present."""
    total = sum(claim.terms.values())
    return sum(weight for term, weight in claim.terms.items() if term in present) / total if total else 0.0


def compare(claim: Sentence, subject: Sentence, sentences: Sequence[Sentence], order: Sequence[int]) -> Features:
    """Return the features of a text.

    Args:
        order: the places of the sentences, those `nearest` to the claim first.
    """
    best, second = sentences[order[0]], sentences[order[min(1, len(order) - 1)]]
    with_subject = best.terms.keys() | subject.terms
    text = frozenset(subject.terms).union(*(each.terms for each in sentences))
    numbers = frozenset[tuple[str, str]]().union(*(each.numbers for each in sentences))
    absent = claim.numbers - best.numbers
    fresh = best.numbers - claim.numbers
    opposed, agreed = _opposites(claim, best)
    letters = {term[:4] for term in with_subject}
    covers = np.array([cover(claim, each.terms) for each in sentences])
    return Features(
        best_cover=cover(claim, best.terms),
        subject_cover=cover(claim, subject.terms),
        best_and_subject_cover=cover(claim, with_subject),
        text_cover=cover(claim, text),
        top_cover=float(np.sort(covers)[-3:].mean()),
        prefixes=_share(len({term[:4] for term in claim.terms} & letters), len(claim.terms)),
        precision=_share(len(best.terms.keys() & claim.terms.keys()), len(best.terms)),
        missing=min(2 * MOST, len(claim.terms.keys() - with_subject - second.terms.keys())),
        names_missing=_share(len(claim.names - with_subject), len(claim.names)),
        names_missing_in_text=_share(len(claim.names - text), len(claim.names)),
        numbers=min(MOST, len(claim.numbers)),
        numbers_equal=min(MOST, len(claim.numbers & best.numbers)),
        numbers_missing=min(MOST, len(absent)),
        numbers_missing_in_text=min(MOST, len(claim.numbers - numbers)),
        number_rival=float(not {kind for kind, _ in absent}.isdisjoint(kind for kind, _ in fresh)),
        numbers_new=min(MOST, len(fresh)),
        claim_denies=float(claim.denials > 0 and not best.denials),
        best_denies=float(best.denials > 0 and not claim.denials),
        both_deny=float(claim.denials > 0 and best.denials > 0),
        opposed=min(MOST, opposed),
        agreed=min(MOST, agreed),
        claim_words=min(40, len(claim.stems)) / 20,
        sentences=min(LONG, len(sentences)) / LONG,
        **_polarity(claim, sentences, covers, order[0]),
    )


def _polarity(
    claim: Sentence, sentences: Sequence[Sentence], covers: np.ndarray[tuple[int], np.dtype[np.float64]], best: int
) -> dict[str, float]:
    """Return the features about denials and opposites in all sentences."""
    weights = covers**2 / (np.sum(covers**2) + 1e-9)
    stances = [_stance(claim, each) for each in sentences]
    odd = np.array([each.denials % 2 for each in sentences])
    alike = np.where(odd == claim.denials % 2, 1, -1)
    parity = [0 if stance is not None else sign for stance, sign in zip(stances, alike, strict=True)]
    denied = float(weights @ odd)
    return {
        "denied_claim": denied if claim.denials else 0.0,
        "denied_text": 0.0 if claim.denials else denied,
        "parity": float(weights @ np.array(parity)),
        "best_stance": stances[best] or 0.0,
        "stance": float(weights @ np.array([each or 0.0 for each in stances])),
    }


def _stance(claim: Sentence, sentence: Sentence) -> float | None:
    """Return the agreement of two sentences about the opposites that both use, or None if there are none."""
    shared = [
        at for at, stem in enumerate(sentence.stems) if len(stem) > 2 and stem in claim.terms and stem not in _SIDES
    ]
    asked: dict[int, int] = defaultdict(int)
    said: dict[int, float] = defaultdict(float)
    for pair, side, _ in claim.turns:
        asked[pair] += side
    for pair, side, at in sentence.turns:
        if asked.get(pair):
            said[pair] += side / (1 + min(abs(at - place) for place in shared) / 4) if shared else side
    agreement = [np.sign(asked[pair]) * max(-1.0, min(1.0, value)) for pair, value in said.items()]
    return float(sum(agreement)) if agreement else None


def _opposites(claim: Sentence, best: Sentence) -> tuple[int, int]:
    """Return how many pairs of opposites the two sentences take different sides of, and the same side."""
    asked, said = _sides(claim.stems), _sides(best.stems)
    common = [(asked[pair], said[pair]) for pair in asked.keys() & said.keys() if asked[pair] and said[pair]]
    return sum(one != other for one, other in common), sum(one == other for one, other in common)


def _sides(stems: Sequence[str]) -> dict[int, int]:
    """Return the side of each pair that is taken by its words alone, whatever denies them; 0 for both sides."""
    taken: dict[int, int] = {}
    for stem in stems:
        for pair, side in _SIDES.get(stem, ()):
            taken[pair] = side if taken.get(pair, side) == side else 0
    return taken


def _turns(stems: Sequence[str], denying: Sequence[bool]) -> Iterator[tuple[int, int, int]]:
    for at, stem in enumerate(stems):
        for pair, side in _SIDES.get(stem, ()):
            yield pair, -side if any(denying[max(0, at - DENIAL_REACH) : at]) else side, at


def _share(count: int, total: int) -> float:
    return count / max(1, total)


_stem_of = lru_cache(maxsize=1 << 14)(stemmer("english"))


def _stem(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(_stem_of, words))


def _table(turning: _Turning) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the pairs that each stem belongs to, with its side."""
    sides: dict[str, dict[tuple[int, int], None]] = defaultdict(dict)
    for pair, line in enumerate(turning.opposites):
        for side, words in zip((1, -1), line.split("|"), strict=True):
            for stem in _stem(words.split()):
                sides[stem][pair, side] = None
    return {stem: tuple(found) for stem, found in sides.items()}


_TOKEN = re.compile(r"[^\W\d_]\w*")
_TURNING = msgspec.toml.decode(resources.files(__package__).joinpath("turning_words.toml").read_bytes(), type=_Turning)
_DENIALS = frozenset(_TURNING.denials.split())
_SIDES = _table(_TURNING)
_CONTENTLESS = FUNCTION_WORDS | _DENIALS | MONTHS | NUMBER_WORDS.keys()
