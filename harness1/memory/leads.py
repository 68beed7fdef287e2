"""Links between the units of a pool: which strong units name which others, and which names are still to be found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness1.memory.entities import extract
from harness1.memory.forkable import Forkable
from harness1.memory.question import SCANNED_CHARACTERS, Question, head, mentions, parts, relatedness
from harness1.records import UnitId

STRONG = 0.1
"""A unit of less strength than this (below place 8 or so) passes nothing on to what it names."""
NEAR_RANKS = 3
"""Ranks of a query about a name that may tell another form of the name."""
HOPS, DECAY = 2, 0.7
"""How often strength is passed on, and the share that is left of it."""
MOST_LINK = 1.5
WORTHWHILE = 0.08
"""A name of less value than this is not worth a search."""
MOST_LEADS = 30
"""Names in documents that are told as leads."""
PART_WORTH = 0.6
"""The value of a part of the question: less than a name in it, more than most names in documents."""


class Names(Forkable):
    """The units that a name may mean, by number. Only `add_unit` and `add_query` write the fields."""

    heads: dict[str, tuple[int, ...]] = {}
    """Units by what their titles name; without a title, by the name that the text begins with."""
    titles: list[str] = []
    sources: dict[str, int] = {}
    """The first unit of each source."""
    near: dict[str, tuple[int, ...]] = {}
    """By query about a name: the units that it found near the top under a longer or shorter form of the name."""

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
    that name it, the strongest first; there is none if the question has it."""

    name: str
    value: float
    sources: tuple[UnitId, ...]
    is_part: bool = False


class Links(NamedTuple):
    """What each unit gets from strong units that name it, in order of arrival; and by key the value of each name in
    them, its spelling, and the units that have it, the strongest first."""

    strengths: NDArray[np.float64]
    values: dict[str, float]
    sources: dict[str, tuple[str, dict[UnitId, None]]]


def links(
    ids: Sequence[UnitId],
    texts: Sequence[tuple[str, ...]],
    names: Names,
    strength: NDArray[np.float64],
    question: Question,
) -> Links:
    """Pass the strength of strong units on to those that they name; arguments are by number of the unit."""
    found: dict[int, dict[str, tuple[int, str]]] = {}
    passed = dict[int, float]()
    times = Counter[str]()
    link = [0.0] * len(ids)
    values, sources = dict[str, float](), dict[str, tuple[str, dict[UnitId, None]]]()
    for _ in range(HOPS):
        for source in np.flatnonzero(strength >= STRONG).tolist():
            if source not in found:
                found[source] = _named(texts[source], names.titles[source], question.relations)
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
    return Links(np.minimum(link, MOST_LINK), values, sources)


def open_leads(links: Links, found: Set[str], queries: Iterable[str], question: str) -> tuple[Lead, ...]:
    """Return what is worth a search, the best first, the names in the question before all: nothing was found under
    that title, and nobody searched for it.

    Args:
        found: what the titles of all units name.
    """
    asked, closed = _asked(question), found | set(map(head, queries))
    worth = [
        (value, name)
        for name, value in links.values.items()
        if value >= WORTHWHILE and name not in closed and name not in asked
    ]
    worth.sort(key=lambda each: -each[0])
    leads = [lead for name, lead in asked.items() if name not in closed]
    for value, name in worth[:MOST_LEADS]:
        spelling, sources = links.sources[name]
        leads.append(Lead(spelling, value, tuple(sources)))
    return tuple(sorted(leads, key=lambda lead: -lead.value))


@lru_cache(maxsize=256)
def _asked(question: str) -> dict[str, Lead]:
    """Return the parts and the names of the question by key."""
    clauses = {head(part): Lead(part, PART_WORTH, (), True) for part in parts(question)}
    return clauses | {head(name): Lead(name, 1.0, ()) for name in mentions(question)}


@lru_cache(maxsize=1024)
def _named(texts: tuple[str, ...], own: str, relations: frozenset[str]) -> dict[str, tuple[int, str]]:
    """Return the names in a unit's texts, except its own, with the number of relation words near each and its
    spelling."""
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
