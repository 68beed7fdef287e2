"""How the pool is ranked, and what is worth a search: the evidence value of each unit, and the leads. All is computed
from the pool, the ranks at which searches returned its units, and the question: a replay computes the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from importlib import resources
from itertools import chain, islice
from math import log
from operator import or_
from struct import Struct
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness1.memory.entities import FUNCTION_WORDS, extract
from harness1.memory.parts import Forkable
from harness1.memory.question import (
    ARTICLE,
    LONGEST_TITLE,
    SCANNED_CHARACTERS,
    Question,
    bits,
    content_terms,
    head,
    likeness,
    mask_of,
    mentions,
    normalise_name,
    opening,
    parts,
    read_question,
    relatedness,
)
from harness1.memory.sentences import split
from harness1.records import Hit, Ranking, Record, UnitId

READ_TERMS = 400  # terms of a unit that count
FEW_TERMS = 50  # a unit of this many terms counts half: the fewer words it has, the less their likeness says


class PoolWords(Forkable):
    """The words of pooled units, which tell how alike units are. Only `add` writes the fields."""

    terms: dict[str, int] = {}  # terms with their numbers
    sizes: list[int] = []  # distinct terms of each unit
    numbers: bytearray = bytearray()  # unit by unit, the numbers of its terms, int32
    often: bytearray = bytearray()  # beside them, the logarithms of 1 + how often the unit has the term, float64

    def add(self, terms: Iterable[str], asked: Container[str]) -> None:
        """Take in the terms of the next unit, except those asked for."""
        counts = Counter([term for term in islice(terms, READ_TERMS) if term not in asked])
        numbers = [self.terms.setdefault(term, len(self.terms)) for term in counts]
        self.sizes.append(len(numbers))
        self.numbers += np.array(numbers, np.int32).tobytes()
        self.often += np.log1p(np.array(list(counts.values()), np.float64)).tobytes()

    def likeness(self, best: Sequence[int]) -> NDArray[np.float64]:
        """Return the mean cosine of each unit with the best ones, itself left out, as a share of the highest; less for
        short units: pseudo relevance feedback (Rocchio 1971) inside the pool. Terms weigh more the rarer they are in
        the pool, and the n-th of the best units counts 1 / (1 + n)."""
        sizes = self.sizes
        units, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum([0, *sizes])
        terms = np.frombuffer(self.numbers, np.int32)
        rarity = np.log1p(len(sizes) / np.maximum(np.bincount(terms, minlength=1), 1))
        weights = np.frombuffer(self.often) * rarity[terms]
        lengths = np.sqrt(np.bincount(units, weights * weights, len(sizes)))
        weights /= np.maximum(lengths, 1e-9)[units]
        shares = np.full(len(sizes), sum(1 / (2 + place) for place in range(len(best))))
        centre, own = np.zeros(len(rarity)), np.zeros(len(sizes))
        for place, unit in enumerate(best):
            held = slice(starts[unit], starts[unit + 1])
            centre[terms[held]] += weights[held] / (2 + place)
            own[unit] = (lengths[unit] > 0) / (2 + place)
            shares[unit] -= 1 / (2 + place)
        cosines = np.bincount(units, weights * centre[terms], len(sizes)) - own
        found = np.round(np.maximum(cosines, 0.0) / np.maximum(shares, 1e-9), 9)
        counts = np.array(sizes)
        likeness: NDArray[np.float64] = counts / (counts + FEW_TERMS) * found / max(float(found.max()), 1e-9)
        return likeness


STRONG = 0.1  # a unit of less strength than this (below place 8 or so) passes nothing on to what it names
NEAR_RANKS = 3  # ranks of a query about a name that may tell another form of the name
HOPS, DECAY = 2, 0.7  # how often strength is passed on, and the share that is left of it
MOST_LINK = 1.5
WORTHWHILE = 0.08  # a name of less value than this is not worth a search
MOST_LEADS = 30  # names in documents that are told as leads
PART_WORTH = 0.6  # the value of a part of the question: less than a name in it, more than most names in documents


class UnitNames(Forkable):
    """The units that a name may mean, by number. Only `add_unit` and `add_query` write them."""

    heads: dict[str, tuple[int, ...]] = {}  # units by what their titles name, or by the name that the text begins with
    titles: list[str] = []
    sources: dict[str, int] = {}  # the first unit of each source
    near: dict[str, tuple[int, ...]] = {}  # by query: units that it found near the top under another form

    def add_unit(self, number: int, head: str) -> None:
        self.titles.append(head)
        if head:
            self.heads[head] = (*self.heads.get(head, ()), number)

    def add_query(self, number: int, query: str, rank: int) -> None:
        """Note the rank at which a query found a unit."""
        title, words = set(self.titles[number].split()), set(query.split())
        nested = title and title != words and (title <= words or words <= title)
        found = self.near.get(query, ())
        if rank < NEAR_RANKS and nested and len(title & words) >= 0.4 * len(title | words) and number not in found:
            self.near[query] = (*found, number)

    def targets(self, name: str) -> list[tuple[int, float]]:
        """Return the units that a name may mean, with shares: an equal title, or a near one that the name found."""
        equal = self.heads.get(name, ())
        near = [(number, 0.5 / len(self.heads[self.titles[number]])) for number in self.near.get(name, ())]
        return [(number, 1 / len(equal)) for number in equal] + near


class Lead(NamedTuple):
    """What is worth a search: a name as a text spells it, or a part of the question. `sources` are the strong units
    that name it, the strongest first; none if the question has it."""

    name: str
    value: float
    sources: tuple[UnitId, ...]
    is_part: bool = False


class NameLinks(NamedTuple):
    """What each unit gets from strong units that name it, in order of arrival; by key the value of each name in them,
    and its spelling with the units that have it, the strongest first."""

    strengths: NDArray[np.float64]
    values: dict[str, float]
    sources: dict[str, tuple[str, dict[UnitId, None]]]


def follow_links(
    ids: Sequence[UnitId],
    texts: Sequence[tuple[str, ...]],
    names: UnitNames,
    strength: NDArray[np.float64],
    question: Question,
) -> NameLinks:
    """Pass the strength of strong units on to those that they name; arguments are by number of the unit."""
    found: dict[int, dict[str, tuple[int, str]]] = {}
    passed = dict[int, float]()
    times = Counter[str]()
    link = [0.0] * len(ids)
    values, sources = dict[str, float](), dict[str, tuple[str, dict[UnitId, None]]]()
    for _ in range(HOPS):
        for source in np.flatnonzero(strength >= STRONG).tolist():
            if source not in found:
                found[source] = _names_in(texts[source], names.titles[source], question.relations)
                times.update(found[source].keys())
        strengths = strength.tolist()
        for source in sorted(found, key=lambda at: -strengths[at]):
            own, unit_id = strengths[source], ids[source]
            if passed.get(source) == own:
                continue  # it has no more to give: names only get commoner
            passed[source] = own
            for name, (near, spelling) in found[source].items():
                value = own * (0.4 + 0.2 * near) * (1.5 if " " in name else 1.0)
                if times[name] > 1:
                    value /= 1 + log(times[name])
                if value > values.get(name, 0.0):
                    values[name] = value
                sources.setdefault(name, (spelling, {}))[1][unit_id] = None
                if name in names.heads or name in names.near:
                    for target, share in names.targets(name):
                        if target != source and value * share > link[target]:
                            link[target] = value * share
        strength = np.maximum(strength, DECAY * np.minimum(1.0, link))
    return NameLinks(np.minimum(link, MOST_LINK), values, sources)


def open_leads(links: NameLinks, found: Set[str], queries: Iterable[str], question: str) -> tuple[Lead, ...]:
    """Return what is worth a search, the best first: nothing was `found` under its title, nobody searched for it."""
    asked, closed = _question_leads(question), found | set(map(head, queries))
    worth = [
        (value, name)
        for name, value in links.values.items()
        if value >= WORTHWHILE and name not in closed and name not in asked
    ]
    worth.sort(key=lambda each: -each[0])
    leads = [lead for name, lead in asked.items() if name not in closed]
    leads += [Lead(links.sources[name][0], value, tuple(links.sources[name][1])) for value, name in worth[:MOST_LEADS]]
    return tuple(sorted(leads, key=lambda lead: -lead.value))


@lru_cache(maxsize=256)
def _question_leads(question: str) -> dict[str, Lead]:
    clauses = {head(part): Lead(part, PART_WORTH, (), True) for part in parts(question)}
    return clauses | {head(name): Lead(name, 1.0, ()) for name in mentions(question)}


@lru_cache(maxsize=1024)
def _names_in(texts: tuple[str, ...], own: str, relations: frozenset[str]) -> dict[str, tuple[int, str]]:
    """Return the names in a unit's texts except its own, each with the relation words near it and its spelling."""
    names: dict[str, tuple[int, str]] = {}
    own = f" {own} "
    for text in texts:
        for name in extract(text, SCANNED_CHARACTERS):
            key = head(name)
            if len(key) > 2 and not key.isdecimal() and f" {key} " not in own:
                near = relatedness(text, name, relations)
                if near >= names.get(key, (0, ""))[0]:
                    names[key] = near, name
    return names


COMPARED = 3  # units at the top whose words speak for others
LEAST_MARGIN = 1e-9  # share of the best score for a hit that an engine scored 0 or below: it was found all the same
TOLD_FROM = 0.5  # the least value of a feature that is told as a reason

_OWN, _MASK, _SENTENCE = Struct("6d"), Struct("q"), Struct("2q")  # rows of numbers in a buffer, read as arrays
_DETAIL = re.compile(r"\(([^)]*)\)\s*$")
_PART = re.compile(r"(?: (?:page|part|section|chapter))?(?: \d+)+$")


class Weights(Record):
    """The weight of each feature. All features grow with the evidence, and none of their weights is negative."""

    margin: float  # score for the question, from the lowest that was read (0) to the highest (1)
    fused: float
    """Reciprocal ranks over all queries, as a share of the highest sum; where the whole question was searched, 0 for
    what only searches for something else found, unless it begins with what they were about or strong units name it."""
    named: float  # the question names the unit by its title; without a title, by the name that its text begins with
    title: float  # share of the title's words that the question has
    cover: float  # share of the question's terms in it, the heavier the rarer among what the question found; scaled
    sentence: float  # the same in one sentence
    names: float  # share of the question's names that title and text have
    link: float  # strong units name it, in two hops; more if a word of the question's relations is near the name
    via: float
    """Reciprocal rank for a query about what title or text begin with, divided by the units of the same source, as many
    pages of one report say that they are about its company."""
    siblings: float  # ranks of other units of the same source by title: pages of a report, sentences of an article
    alike: float  # it reads like the units at the top
    semantic: float  # place by the likeness of its embedding to the question's: 1 / (1 + place / 5); 0 without any


class Fitted(Record):
    """The weights where nothing is known of embeddings, and where something is."""

    terms: Weights
    embeddings: Weights


FITTED = msgspec.toml.decode(resources.files(__package__).joinpath("evidence_weights.toml").read_bytes(), type=Fitted)
FEATURES = Weights.__struct_fields__
_AT = {name: at for at, name in enumerate(FEATURES)}
_TERMS, _EMBEDDINGS = (np.array(msgspec.structs.astuple(weights)) for weights in (FITTED.terms, FITTED.embeddings))
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
    features: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(FEATURES))))  # [units, features]
    leads: tuple[Lead, ...] = ()

    @cached_property
    def places(self) -> dict[UnitId, int]:
        return {unit_id: place for place, unit_id in enumerate(self.units)}

    @cached_property
    def reasons(self) -> dict[UnitId, str]:
        """In a few words the strongest feature of each unit; empty if none is strong."""
        told = self.features[:, _COLUMNS]
        highest = np.where(told.max(axis=1) >= TOLD_FROM, told.argmax(axis=1), len(_COLUMNS))
        return {unit_id: _REASONS[at] for unit_id, at in zip(self.units, highest.tolist(), strict=True)}


class EvidenceValue(Forkable):
    """The features of all pooled units, by number in order of arrival. Only `add` and `rank` write the fields."""

    numbers: dict[UnitId, int] = {}
    titles: list[str] = []
    texts: list[tuple[str, ...]] = []
    own: bytearray = bytearray()
    """Of each unit, as `_OWN`: share of the best score for the question, best rank as 1 / (1 + rank / 5), the sum for
    `fused`, share of the title, via, and the likeness of the embedding (0: unknown)."""
    masks: bytearray = bytearray()  # the terms of the question in each unit, as sets of bits (`_MASK`)
    sentences: bytearray = bytearray()  # units, and the terms of one of their sentences, as `_SENTENCE`
    asked: list[str] = []  # the names of units that the question has
    names: UnitNames = msgspec.field(default_factory=UnitNames)
    sources: list[int] = []
    """Of each unit: the first that is about the same by title or by the name that its text begins with; or itself."""
    words: PoolWords = msgspec.field(default_factory=PoolWords)
    pages: dict[str, int] = {}  # ranks that were read of each query, page by page
    best: dict[str, float] = {}  # the best score of each query that has all terms of the question

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
            meant = head(name) or opening(text)
            if meant not in self.names.heads and f" {meant} " in question.flat and len(meant) > 2:
                self.asked += [meant] * (meant not in FUNCTION_WORDS)
            self.names.add_unit(number, meant)
            source = _PART.sub("", meant)
            self.sources.append(self.names.sources.setdefault(source, number) if source else number)
            self.words.add(chain.from_iterable(read), question.terms)
        self.texts[number] = (*self.texts[number], text)
        if hit.likeness is not None:
            *own, known = _OWN.unpack_from(self.own, number * _OWN.size)
            _OWN.pack_into(self.own, number * _OWN.size, *own, max(known, hit.likeness))
        (mask,) = _MASK.unpack_from(self.masks, number * _MASK.size)
        _MASK.pack_into(self.masks, number * _MASK.size, reduce(or_, found, mask))
        for mask in sorted(found):
            if not any(mask != other and mask & other == mask for other in found):
                self.sentences += _SENTENCE.pack(number, mask)

    def rank(self, rankings: Sequence[Ranking], found: Mapping[str, tuple[UnitId, float]], query: str) -> None:
        """Take in the rankings of a search; `found` has the unit and the score of each shown hit, by chunk."""
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
                self._note_place(self.numbers[unit_id], line, first + place, share, margin)

    def _note_place(self, number: int, query: str, rank: int, likeness: float, margin: float) -> None:
        best, place, fused, title, via, semantic = _OWN.unpack_from(self.own, number * _OWN.size)
        place, fused = max(place, likeness / (1 + rank / 5)), fused + (1.0 if likeness == 1 else 0.5) / (60 + rank)
        if likeness == 1:
            best = max(best, margin, LEAST_MARGIN)
        else:
            self.names.add_query(number, head(query), rank)
            words, texts = query.lower(), (self.titles[number], *self.texts[number])
            end = len(words) + ARTICLE  # an article may stand before what a title or a text begins with
            if 1 / (1 + rank) > via and any(words in text[:end].lower() for text in texts):
                via = 1 / (1 + rank)
        _OWN.pack_into(self.own, number * _OWN.size, best, place, fused, title, via, semantic)

    def assess(self, query: str) -> Assessment:
        """Return the order of the units, ties in order of arrival, and the leads."""
        features, found = self.features(query)
        values, ids = np.round(features @ weights_for(features), 9), list(self.numbers)
        order = np.argsort(-values, kind="stable")
        units = tuple([ids[at] for at in order.tolist()])
        leads = open_leads(found, self.names.heads.keys(), self.pages, query)
        return Assessment(units, features[order], leads)

    def features(self, query: str) -> tuple[NDArray[np.float64], NameLinks]:
        """Return the features of all units in order of arrival, shape [units, features], and what strong units name."""
        question = read_question(query)
        table = np.zeros((len(self.numbers), len(FEATURES)))
        if not self.numbers:
            return table, NameLinks(np.zeros(0), {}, {})
        by_question = self._write_own(table, question)
        place = np.argsort(-table @ weights_for(table), kind="stable")
        strength = np.empty(len(table))
        strength[place] = 1 / (2 + np.arange(len(table)))
        strength = np.maximum(strength, table[:, _AT["named"]])
        table[:, _AT["alike"]] = self.words.likeness(place[:COMPARED].tolist())
        found = follow_links(list(self.numbers), self.texts, self.names, strength, question)
        table[:, _AT["link"]] = found.strengths
        if by_question.any():
            table[:, _AT["fused"]] *= by_question | table[:, [_AT["link"], _AT["via"]]].any(axis=1)
        return table, found

    def _write_own(self, table: NDArray[np.float64], question: Question) -> NDArray[np.bool_]:
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
        held = bits(masks, len(question.terms))
        by_question: NDArray[np.bool_] = best > 0
        # What the leads bring has other terms: it must not reorder what the question found.
        found = held[by_question] if by_question.any() else held
        counts = found.sum(axis=0)
        rarity = np.log1p((len(found) - counts + 0.5) / (counts + 0.5))
        rarity /= max(float(rarity.sum()), 1e-9)
        cover = held @ rarity
        table[:, _AT["cover"]] = cover / max(float(cover.max()), 1e-9)
        units, sentences = np.frombuffer(self.sentences, np.int64).reshape(-1, 2).T
        said = np.zeros(len(table))
        np.maximum.at(said, units, bits(sentences, len(question.terms)) @ rarity)
        table[:, _AT["sentence"]] = said / max(float(said.max()), 1e-9)
        for mask in question.names:
            table[:, _AT["names"]] += (np.bitwise_and(masks, mask) == mask) / len(question.names)
        for name in self.asked:
            part = any(other != name and f" {name} " in f" {other} " for other in self.asked)
            for number in self.names.heads[name]:
                # Less sure: one of several texts without a title, and a title that is part of a longer name.
                detail = _DETAIL.search(self.titles[number])
                meant = detail and f" {normalise_name(detail.group(1))} " in question.flat
                share = 1.0 if self.titles[number] else 1 / len(self.names.heads[name])
                table[number, _AT["named"]] = share * (0.25 if part and not meant else 1.0)
        return by_question


def weights_for(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights of features: others where embeddings are known."""
    return _EMBEDDINGS if features[:, _AT["semantic"]].any() else _TERMS
