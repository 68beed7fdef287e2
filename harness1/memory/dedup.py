"""Near-duplicate detection: MinHash over token shingles, guarded by titles, numbers, dates and negations."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from harness1.memory.parts import Forkable
from harness1.memory.sentences import WORDS, runs, table, tokens
from harness1.plain import text_digest

Guard: TypeAlias = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]

NEGATIONS, MONTHS, _DAYS, _NUMBER_WORDS = (WORDS[kind] for kind in ("negations", "months", "days", "numbers"))
_WATCHED = NEGATIONS | MONTHS | _DAYS | _NUMBER_WORDS
_TOKEN = re.compile(r"\w+")
_DIGITS = re.compile(r"\d+")
_KEPT_DIGITS = table(str.isdigit)
_NUMBER = re.compile(r"\d(?:[\d.,:/\-–]*\d)?(?:%| %|st\b|nd\b|rd\b|th\b|s\b)?")
_SIGNS = "$€£¥-−"

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 4096  # shingles hashed at once, which bounds memory for texts of any length

PERMUTATIONS, SHINGLE = 64, 5  # hashes of a signature (more estimate likeness better), and words of a shingle
THRESHOLD = 0.85  # estimated Jaccard similarity of the shingles from which two texts are near duplicates
LEAST_CHARACTERS = 40  # characters below which a text is never a duplicate: short ones are alike by chance


@lru_cache(maxsize=1024)
def signature(text: str, permutations: int, shingle: int) -> bytes:
    """Return the MinHash (Broder 1997) of a text's shingles: `permutations` little-endian uint32, equal on every
    machine. Tokens, the runs of letters and digits of any script in lower case, are hashed with CRC-32; a shingle is a
    polynomial in its token hashes mod 2^64; each permutation is a multiply-add-shift hash (Dietzfelbinger 1996) with
    constants from SplitMix64. A text with fewer than `shingle` tokens has shingles of one."""
    words = " ".join(tokens(text)).encode("utf-8", "surrogatepass").split()
    crcs = np.fromiter(map(zlib.crc32, words), np.uint64, len(words))
    size = shingle if len(words) >= shingle else 1
    combined = np.zeros(len(words) - size + 1, np.uint64) if words else crcs
    for offset in range(size if words else 0):
        combined = combined * _GOLDEN + crcs[offset : offset + len(combined)]
    hashes = _mix(combined) >> np.uint64(32)
    factor, shift = _constants(permutations)
    least = np.full(permutations, 0xFFFFFFFF, np.uint64)
    for start in range(0, len(hashes), _BLOCK):
        permuted = hashes[start : start + _BLOCK] * factor
        permuted += shift
        np.minimum(least, permuted.min(axis=1) >> np.uint64(32), out=least)
    return least.astype("<u4").tobytes()


def guard(title: str, text: str) -> Guard:
    """Return what must be equal for two texts to count as duplicates: (title, numbers, dates, negations). Titles are
    compared without case and spacing, the others as multisets (sorted tuples). Numbers hold their sign, currency,
    percent and ordinal marks, and include number words; a date is a month or weekday with the numbers beside it."""
    lowered = text.lower()
    words = tokens(lowered)
    numbers = []
    for match in _NUMBER.finditer(lowered):
        before = lowered[max(0, match.start() - 2) : match.start()]
        # A hyphen after a letter or digit is no sign.
        signed = before[-1:] in _SIGNS and before != "" and not (before[-1] in "-−" and before[:-1].strip())
        numbers.append(before[-1] + match.group() if signed else match.group())
    dates, negations = [], ["n't"] * (lowered.count("n't") + lowered.count("n’t"))
    for word in _WATCHED.intersection(words):
        if word in NEGATIONS:
            negations += [word] * words.count(word)
        elif word in _NUMBER_WORDS:
            numbers += [word] * words.count(word)
        else:
            for at in (at for at, each in enumerate(words) if each == word):
                beside = (*words[max(0, at - 1) : at], *words[at : at + 3])
                dates.append(" ".join(each for each in beside if each[0].isdigit() or each in MONTHS or each in _DAYS))
    return " ".join(title.casefold().split()), tuple(sorted(numbers)), tuple(sorted(dates)), tuple(sorted(negations))


class Bucket(msgspec.Struct, frozen=True):
    """The representatives with one guard. Until a second one arrives, no signature is computed."""

    ids: tuple[str, ...]
    first: str
    signatures: bytes = b""

    def all_signatures(self) -> bytes:
        return self.signatures or _signature(self.first)


class Fingerprints(Forkable):
    """The texts of an episode that do not duplicate each other, as plain data. Only texts with equal guards are
    compared, and those exactly: locality-sensitive hashing at 64 permutations would miss most pairs near the threshold.
    Most texts share title and figures with no other, so guards and signatures wait for a second such text."""

    firsts: dict[str, tuple[str, str, str] | None] = {}  # title, figures -> first such text; None: it is in a bucket
    buckets: dict[str, Bucket] = {}  # guard -> the texts that share title and figures with another

    def match(self, identifier: str, title: str, text: str) -> str | None:
        """Return the representative that a text repeats, the most similar, then the earliest: guards are equal and the
        similarity reaches the threshold. Short texts, those without tokens and one's own match nothing."""
        if not _comparable(text):
            return None
        figures = _figures(title, text)
        if figures not in self.firsts:
            return None
        bucket = self.buckets.get(_bucket_key(title, text))
        first = self.firsts[figures]
        if first is not None and _bucket_key(*first[1:]) == _bucket_key(title, text):
            bucket = Bucket(first[:1], first[2])
        if bucket is None:
            return None
        own = np.frombuffer(_signature(text), "<u4")
        equal = np.frombuffer(bucket.all_signatures(), "<u4").reshape(-1, len(own)) == own
        # The share of equal positions estimates the Jaccard similarity, with error sqrt(J (1 - J) / permutations).
        similar = zip(equal.mean(axis=1).tolist(), bucket.ids, strict=True)
        found = [each for each in similar if each[0] >= THRESHOLD and each[1] != identifier]
        return max(found, key=lambda each: each[0])[1] if found else None

    def add(self, identifier: str, title: str, text: str) -> None:
        """Make a text a representative, unless it can never match."""
        if not _comparable(text):
            return
        figures, own = _figures(title, text), (identifier, title, text)
        if figures not in self.firsts:
            self.firsts[figures] = own
            return
        first, self.firsts[figures] = self.firsts[figures], None
        for name, *said in (own,) if first is None else (first, own):
            key = _bucket_key(*said)
            known = self.buckets.get(key)
            if known is None:
                self.buckets[key] = Bucket((name,), said[1])
            else:
                signatures = known.all_signatures() + _signature(said[1])
                self.buckets[key] = Bucket((*known.ids, name), known.first, signatures)


def _comparable(text: str) -> bool:
    return len(text) >= LEAST_CHARACTERS and _TOKEN.search(text) is not None


@lru_cache(maxsize=1024)
def _bucket_key(title: str, text: str) -> str:
    name, *parts = guard(title, text)
    return text_digest("\n".join([name, *map("\x1f".join, parts)]))


@lru_cache(maxsize=1024)
def _figures(title: str, text: str) -> str:
    return "\x1f".join([" ".join(title.casefold().split()), *sorted(runs(text, _KEPT_DIGITS, _DIGITS))])


def _signature(text: str) -> bytes:
    return signature(text, PERMUTATIONS, SHINGLE)


@lru_cache(maxsize=8)
def _constants(permutations: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return factors and shifts of the permutations, each of shape (permutations, 1)."""
    constants = _mix(np.arange(1, 2 * permutations + 1, dtype=np.uint64) * _GOLDEN)
    return constants[:permutations, None], constants[permutations:, None]


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the output function of SplitMix64 (Steele et al. 2014), a bijection that spreads every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
