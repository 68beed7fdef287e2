"""The evidence value of a unit: how much of what the memory knows speaks for it. It ranks the pool.

The value is a weighted sum of the features below. Everything is computed from the pool, the ranks at which searches
returned its units, and the question; statistics are those of the pool, so that a replay computes the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib import resources
from itertools import chain
from operator import or_
from struct import Struct

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness1.memory.entities import FUNCTION_WORDS
from harness1.memory.feedback import Vocabulary
from harness1.memory.forkable import Forkable
from harness1.memory.leads import Lead, Links, Names, links, open_leads
from harness1.memory.question import (
    ARTICLE,
    LONGEST_TITLE,
    SCANNED_CHARACTERS,
    Question,
    content_terms,
    head,
    likeness,
    mask_of,
    normalised_name,
    opening,
    read_question,
)
from harness1.memory.sentences import split
from harness1.records import Hit, Ranking, Record, UnitId

COMPARED = 3
"""Units at the top whose words speak for others."""

LEAST_MARGIN = 1e-9
"""The share of the best score for a hit that an engine scored 0 or below: the question found it all the same."""
TOLD_FROM = 0.5
"""The least value of a feature that is told as a reason."""

_OWN, _MASK, _SENTENCE = Struct("6d"), Struct("q"), Struct("2q")
"""Rows of numbers that stand side by side in a buffer: read as arrays, they need not be gathered at each turn."""

_DETAIL = re.compile(r"\(([^)]*)\)\s*$")
_PART = re.compile(r"(?: (?:page|part|section|chapter))?(?: \d+)+$")


class Weights(Record):
    """The weight of each feature. All features grow with the evidence, and none of their weights is negative."""

    margin: float
    """Score for the question, from the lowest that was read (0) to the highest (1)."""
    fused: float
    """Reciprocal ranks over all queries, as a share of the highest sum; where the whole question was searched, 0 for
    what only searches for something else found, unless it begins with what they were about or strong units name it."""
    named: float
    """The question names the unit by its title; without a title, by the name that its text begins with, which counts
    less if other texts begin with it too."""
    title: float
    """Share of the title's words that the question has."""
    cover: float
    """Share of the question's terms that title and text have, the heavier the rarer among the units that the question
    found; as a share of the highest."""
    sentence: float
    """The same in one sentence."""
    names: float
    """Share of the question's names that title and text have."""
    link: float
    """Strong units name it, in two hops; more if a word of the question's relations is near the name."""
    via: float
    """Reciprocal rank for a query about something else, such as a name, that the title or a text begins with; divided
    by the number of units of the same source, as many pages of one report say that they are about its company."""
    siblings: float
    """Ranks of other units of the same source by title, such as pages of a report or sentences of an article."""
    alike: float
    """It reads like the units at the top."""
    semantic: float
    """Place by the likeness of its embedding to the question's, as 1 / (1 + place / 5); 0 without embeddings."""


class Fitted(Record):
    """The weights where nothing is known of embeddings, and where something is."""

    terms: Weights
    embeddings: Weights


FITTED = msgspec.toml.decode(resources.files(__package__).joinpath("evidence_weights.toml").read_bytes(), type=Fitted)
FEATURES = Weights.__struct_fields__
_TERMS, _EMBEDDINGS = (np.array(msgspec.structs.astuple(weights)) for weights in (FITTED.terms, FITTED.embeddings))
_AT = {name: at for at, name in enumerate(FEATURES)}
_TOLD = {
    "named": "named in the question",
    "sentence": "one sentence answers much",
    "alike": "reads like the best",
    "link": "named by strong documents",
    "semantic": "close in meaning",
}
"""Features that are reasons, and their words."""
_COLUMNS, _REASONS = [_AT[name] for name in _TOLD], (*_TOLD.values(), "")


@dataclass(frozen=True)
class Assessment:
    """The pooled units and the names to search next, each with the most valuable first."""

    units: tuple[UnitId, ...] = ()
    features: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(FEATURES))))
    """Shape [units, features]."""
    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    leads: tuple[Lead, ...] = ()

    def reasons(self) -> list[str]:
        """Return for each unit the strongest feature that can be put in words; an empty string if none is strong."""
        told = self.features[:, _COLUMNS]
        highest = np.where(told.max(axis=1) >= TOLD_FROM, told.argmax(axis=1), len(_COLUMNS))
        return [_REASONS[at] for at in highest.tolist()]


class EvidenceValue(Forkable):
    """The features of all pooled units, kept as hits come. Only `add` and `rank` write the fields. Units have numbers
    in order of arrival."""

    numbers: dict[UnitId, int] = {}
    titles: list[str] = []
    texts: list[tuple[str, ...]] = []
    own: bytearray = bytearray()
    """Of each unit, as `_OWN`: share of the best score for the question, best rank as 1 / (1 + rank / 5), the sum for
    `fused`, share of the title, via, and the likeness of the embedding (0: unknown)."""
    masks: bytearray = bytearray()
    """The terms of the question in each unit, as sets of bits (`_MASK`)."""
    sentences: bytearray = bytearray()
    """Units, and the terms of one of their sentences, as `_SENTENCE`."""
    asked: list[str] = []
    """The names of units that the question has."""
    names: Names = msgspec.field(default_factory=Names)
    sources: list[int] = []
    """Of each unit: the first unit that is about the same by title, or without one by the name that its text begins
    with; itself if it has neither."""
    words: Vocabulary = msgspec.field(default_factory=Vocabulary)
    pages: dict[str, int] = {}
    """Ranks that were read of each query, page by page."""
    best: dict[str, float] = {}
    """The best score of each query that has all terms of the question."""

    def add(self, unit_id: UnitId, hit: Hit, query: str) -> None:
        """Take in a chunk of a pooled unit."""
        question = read_question(query)
        number = self.numbers.get(unit_id)
        text = hit.text[:SCANNED_CHARACTERS]
        name = hit.title[:LONGEST_TITLE] if head(hit.title) else ""
        read = [content_terms(line) for line in (name, *split(text))]
        title, *sentences = [mask_of(line, question.terms) for line in read]
        found = set(sentences)
        if number is None:
            number = self.numbers[unit_id] = len(self.numbers)
            share = title.bit_count() / max(1, len(set(content_terms(name))))
            self.titles.append(name)
            self.texts.append(())
            self.own += _OWN.pack(0.0, 0.0, 0.0, share, 0.0, 0.0)
            self.masks += _MASK.pack(title)
            self._name(number, name, text, question)
            self.words.add(chain.from_iterable(read), question.terms)
        self.texts[number] = (*self.texts[number], text)
        if hit.likeness is not None:
            *own, known = _OWN.unpack_from(self.own, number * _OWN.size)
            _OWN.pack_into(self.own, number * _OWN.size, *own, max(known, hit.likeness))
        (mask,) = _MASK.unpack_from(self.masks, number * _MASK.size)
        _MASK.pack_into(self.masks, number * _MASK.size, reduce(or_, found, mask))
        for mask in _largest(found):
            self.sentences += _SENTENCE.pack(number, mask)

    def _name(self, number: int, title: str, text: str, question: Question) -> None:
        name = head(title) or opening(text)
        if name not in self.names.heads and f" {name} " in question.flat and len(name) > 2:
            self.asked += [name] * (name not in FUNCTION_WORDS)
        self.names.add_unit(number, name)
        source = _PART.sub("", name)
        self.sources.append(self.names.sources.setdefault(source, number) if source else number)

    def rank(self, rankings: Sequence[Ranking], found: Mapping[str, tuple[UnitId, float]], query: str) -> None:
        """Take in the rankings of a search.

        Args:
            found: by chunk, the pooled unit and the score of each hit that was shown.
        """
        question = read_question(query)
        for ranking in rankings:
            line = " ".join(ranking.query.split())
            shown = [(place, *found[chunk]) for place, chunk in enumerate(ranking.chunk_ids) if chunk in found]
            if not shown:
                continue
            first = self.pages.get(line, 0)
            self.pages[line] = first + len(ranking.chunk_ids)
            share = likeness(line, question)
            alone = len(rankings) == 1 and share == 1
            if alone:
                self.best.setdefault(line, max(score for _, _, score in shown))
            for place, unit_id, score in shown:
                # The scores of several queries at once are those of whichever query found the hit first.
                margin = score / self.best[line] if alone and self.best[line] > 0 else 1 / (1 + place / 20)
                self._found(self.numbers[unit_id], line, first + place, share, margin)

    def _found(self, number: int, query: str, rank: int, likeness: float, margin: float) -> None:
        best, place, fused, title, via, semantic = _OWN.unpack_from(self.own, number * _OWN.size)
        place, fused = max(place, likeness / (1 + rank / 5)), fused + (1.0 if likeness == 1 else 0.5) / (60 + rank)
        if likeness == 1:
            best = max(best, margin, LEAST_MARGIN)
        else:
            self.names.add_query(number, head(query), rank)
            if 1 / (1 + rank) > via and self._opens(number, query.lower()):
                via = 1 / (1 + rank)
        _OWN.pack_into(self.own, number * _OWN.size, best, place, fused, title, via, semantic)

    def _opens(self, number: int, words: str) -> bool:
        """Return whether the title or a text begins with some words; an article may stand before them."""
        end = len(words) + ARTICLE
        return any(words in text[:end].lower() for text in (self.titles[number], *self.texts[number]))

    def features(self, query: str) -> NDArray[np.float64]:
        """Return the features of all units in order of arrival, shape [units, features]."""
        return self._features(query)[0]

    def assess(self, query: str) -> Assessment:
        """Return the order of the units, ties in order of arrival, and the leads."""
        features, found = self._features(query)
        values, ids = np.round(features @ _weights(features), 9), list(self.numbers)
        order = np.argsort(-values, kind="stable")
        units = tuple([ids[at] for at in order.tolist()])
        return Assessment(
            units, features[order], values[order], open_leads(found, self.names.heads.keys(), self.pages, query)
        )

    def _features(self, query: str) -> tuple[NDArray[np.float64], Links]:
        """Return the features, and what strong units name."""
        question = read_question(query)
        table = np.zeros((len(self.numbers), len(FEATURES)))
        if not self.numbers:
            return table, Links(np.zeros(0), {}, {})
        by_question = self._own(table, question)
        place = np.argsort(-table @ _weights(table), kind="stable")
        strength = np.empty(len(table))
        strength[place] = 1 / (2 + np.arange(len(table)))
        strength = np.maximum(strength, table[:, _AT["named"]])
        table[:, _AT["alike"]] = self.words.likeness(place[:COMPARED].tolist())
        found = links(list(self.numbers), self.texts, self.names, strength, question)
        table[:, _AT["link"]] = found.strengths
        if by_question.any():
            table[:, _AT["fused"]] *= by_question | table[:, [_AT["link"], _AT["via"]]].any(axis=1)
        return table, found

    def _own(self, table: NDArray[np.float64], question: Question) -> NDArray[np.bool_]:
        """Write the features that each unit has by itself; return which units a search for the whole question found."""
        best, ranks, fused, title, via, semantic = np.frombuffer(self.own, np.float64).reshape(len(table), -1).T
        lowest = best[best > 0].min(initial=1.0)
        table[:, _AT["margin"]] = np.maximum(best - lowest, 0.0) / max(1 - lowest, 1e-9)
        table[:, _AT["fused"]] = fused / max(float(fused.max()), 1e-9)
        table[:, _AT["title"]], table[:, _AT["via"]] = title, via / np.bincount(self.sources)[self.sources]
        better = len(table) - np.searchsorted(np.sort(semantic), semantic, side="right")
        table[:, _AT["semantic"]] = (semantic > 0) / (1 + better / 5)
        together = np.bincount(self.sources, ranks, len(table))[self.sources]
        titled = np.array(list(map(bool, self.titles)))
        table[:, _AT["siblings"]] = titled * np.minimum(1.5, (together - ranks) / 3)
        masks = np.frombuffer(self.masks, np.int64)
        bits = _bits(masks, len(question.terms))
        by_question: NDArray[np.bool_] = best > 0
        # What the leads bring has other terms: it must not reorder what the question found.
        rarity = _rarity(bits[by_question] if by_question.any() else bits)
        cover = bits @ rarity
        table[:, _AT["cover"]] = cover / max(float(cover.max()), 1e-9)
        units, sentences = np.frombuffer(self.sentences, np.int64).reshape(-1, 2).T
        said = np.zeros(len(table))
        np.maximum.at(said, units, _bits(sentences, len(question.terms)) @ rarity)
        table[:, _AT["sentence"]] = said / max(float(said.max()), 1e-9)
        for mask in question.names:
            table[:, _AT["names"]] += (np.bitwise_and(masks, mask) == mask) / len(question.names)
        for number, value in self._named(question).items():
            table[number, _AT["named"]] = value
        return by_question

    def _named(self, question: Question) -> dict[int, float]:
        """Return how surely the question names units: less for a title that is part of a longer name in it."""
        values: dict[int, float] = {}
        for name in self.asked:
            part = any(other != name and f" {name} " in f" {other} " for other in self.asked)
            for number in self.names.heads[name]:
                detail = _DETAIL.search(self.titles[number])
                meant = detail and f" {normalised_name(detail.group(1))} " in question.flat
                share = 1.0 if self.titles[number] else 1 / len(self.names.heads[name])
                values[number] = share * (0.25 if part and not meant else 1.0)
        return values


def _weights(features: NDArray[np.float64]) -> NDArray[np.float64]:
    return _EMBEDDINGS if features[:, _AT["semantic"]].any() else _TERMS


def _rarity(bits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the inverse document frequency of each term of the question among units; they sum to 1."""
    counts = bits.sum(axis=0)
    weights: NDArray[np.float64] = np.log1p((len(bits) - counts + 0.5) / (counts + 0.5))
    weights /= max(float(weights.sum()), 1e-9)
    return weights


def _bits(masks: NDArray[np.int64], terms: int) -> NDArray[np.float64]:
    """Return sets of terms as rows of 0 and 1."""
    return ((masks[:, None] >> np.arange(terms)) & 1).astype(np.float64)


def _largest(masks: set[int]) -> list[int]:
    """Return the sets that are not part of another one, in a fixed order."""
    return sorted(mask for mask in masks if not any(mask != other and mask & other == mask for other in masks))
