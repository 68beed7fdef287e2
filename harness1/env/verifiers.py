"""Verifiers, which judge whether documents support a claim: the protocol, and one without a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
import Stemmer

from harness1.config import Env
from harness1.memory.dedup import MONTHS, NEGATIONS
from harness1.memory.entities import FUNCTION_WORDS, extract
from harness1.memory.sentences import WORDS, split
from harness1.records import Record, UnitId
from harness1.tools.documents import JUDGED_CHARACTERS

Label: TypeAlias = Literal["yes", "no", "unclear"]


class Judgement(Record, frozen=True):
    """A verdict on one document, with the passage that supports it."""

    label: Label
    sentence: str = ""


class VerifierFault(Record, frozen=True):
    """A failure on one document, as a value: the other documents keep their judgements."""

    message: str


class Verifier(Protocol):
    """Judges claims; concurrent episodes may share it."""

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        """Judge a claim against the text of each document, in order."""


class _Passage(msgspec.Struct, frozen=True):
    text: str
    terms: frozenset[str]  # stems of the content words, without numbers
    numbers: frozenset[tuple[str, str]]  # (kind, value), where kind is percent, money, year, month or count
    negated: bool


class LexicalVerifier:
    """A cheap, local and repeatable verifier that compares words, names, numbers and negations. `support` and
    `conflict` are shares of the claim's terms that a passage must have to support or, otherwise put, contradict it."""

    def __init__(self, characters: int = 6000, support: float = 0.7, conflict: float = 0.8) -> None:
        self.characters, self.support, self.conflict = characters, support, conflict

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        """Judge each document by the rule of `_label`."""
        stemmer = Stemmer.Stemmer("english")
        read = _read(claim, stemmer)
        names = _stems(" ".join(extract(claim, self.characters)), stemmer)
        return [self._judge(read, names & read.terms, text[: self.characters], stemmer) for _, text in documents]

    def _judge(self, claim: _Passage, names: frozenset[str], text: str, stemmer: Stemmer.Stemmer) -> Judgement:
        sentences = [_read(sentence, stemmer) for sentence in split(text)]
        if not sentences or not (claim.terms or claim.numbers):
            return Judgement("unclear")
        lead = sentences[0].terms & names

        def rank(window: _Passage) -> tuple[int, int]:
            found = len(claim.terms & (window.terms | lead)) + len(claim.numbers & window.numbers)
            return found, -len(window.text)

        windows: list[_Passage] = []
        for start, window in enumerate(sentences):
            windows.append(window)
            for following in sentences[start + 1 : start + 3]:
                window = _Passage(
                    f"{window.text} {following.text}",
                    window.terms | following.terms,
                    window.numbers | following.numbers,
                    window.negated or following.negated,
                )
                windows.append(window)
        best = max(windows, key=rank)
        return Judgement(self._label(claim, names, lead, best), best.text)

    def _label(self, claim: _Passage, names: frozenset[str], lead: frozenset[str], window: _Passage) -> Label:
        """Return `yes` for all names and numbers, most terms and the same polarity; `no` for all names and a high
        overlap with either another number of the same kind or the opposite polarity (a negation, or a word such as
        "higher" replaced by its opposite); else `unclear`."""
        present = window.terms | lead
        coverage = len(claim.terms & present) / len(claim.terms) if claim.terms else 1.0
        if not names <= present:
            return "unclear"
        missing = claim.numbers - window.numbers
        rivals = {kind for kind, _ in window.numbers - claim.numbers}
        if missing:
            conflicts = coverage >= self.conflict and all(kind in rivals for kind, _ in missing)
            return "no" if conflicts else "unclear"
        opposed = any(not window.terms.isdisjoint(_OPPOSITES.get(term, ())) for term in claim.terms - present)
        if (claim.negated != window.negated) != opposed:
            return "no" if coverage >= self.conflict else "unclear"
        return "yes" if coverage >= self.support else "unclear"


_TOKEN = re.compile(r"[^\W\d_]\w*")
_NUMBER = re.compile(r"([$€£¥]?)(?<![\w.,])(\d[\d,]*+(?:\.\d+)?)(\s?%|\s?per\s?cent\b)?")
_NUMERALS = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMBER_WORDS = {word: str(value) for value, word in enumerate(_NUMERALS.split())}
_RISING, _FALLING = WORDS["rising"], WORDS["falling"]
_OPPOSITES = dict.fromkeys(_RISING, _FALLING) | dict.fromkeys(_FALLING, _RISING)  # stems of opposite meaning, by stem


def _read(text: str, stemmer: Stemmer.Stemmer) -> _Passage:
    words = _TOKEN.findall(text.lower())
    negated = not NEGATIONS.isdisjoint(words) or "n't" in text or "n’t" in text
    return _Passage(text, _stems(text, stemmer), _numbers(text.lower(), words), negated)


def _stems(text: str, stemmer: Stemmer.Stemmer) -> frozenset[str]:
    ignored = FUNCTION_WORDS | NEGATIONS | MONTHS | _NUMBER_WORDS.keys()
    words = {word for word in _TOKEN.findall(text.lower()) if len(word) > 1 and word not in ignored}
    return frozenset(stemmer.stemWords(sorted(words)))


def _numbers(lowered: str, words: Collection[str]) -> frozenset[tuple[str, str]]:
    # "one" and "may" say too little.
    numbers = set[tuple[str, str]]()
    for sign, digits, percent in _NUMBER.findall(lowered):
        year = len(digits) == 4 and "1000" <= digits <= "2099"
        kind = "percent" if percent else "money" if sign else "year" if year else "count"
        numbers.add((kind, digits.replace(",", "")))
    numbers |= {("count", _NUMBER_WORDS[word]) for word in words if word in _NUMBER_WORDS and word != "one"}
    numbers |= {("month", word) for word in words if word in MONTHS and word != "may"}
    return frozenset(numbers)


def unopened_verifier(env: Env) -> Verifier:
    """Return a verifier that needs no model: the configured one, or one that always fails."""
    judge = env.verification.judge
    return LexicalVerifier(JUDGED_CHARACTERS) if judge == "lexical" else NoVerifier(judge)


class NoVerifier:
    """A placeholder for a configured verifier that was not opened. It always returns faults, never a substitute."""

    def __init__(self, judge: str) -> None:
        self._fault = VerifierFault(f"env.verification.judge={judge} needs a verifier from open_verifier")

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        return [self._fault] * len(documents)
