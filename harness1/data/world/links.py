"""Links the entities of a synthetic world, and gives them plain values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from harness1.data.world import names
from harness1.data.world.facts import Entity, Kind, deal
from harness1.data.world.names import below, pick

AMOUNTS = 400
"""Distinct sums of money in the whole world: few, so that many filings state the same amount."""


def link_entities(entities: list[Entity], ranges: dict[Kind, range], seed: int) -> None:
    """Fill in the facts of all entities. The objects of a relation are dealt evenly, so that no name is everywhere."""
    table = _Table(entities, ranges)
    for kind, fill in FILLERS.items():
        fill(table, random.Random(f"world/{seed}/{kind} facts"), ranges[kind])


class _Table:
    def __init__(self, entities: list[Entity], ranges: dict[Kind, range]) -> None:
        self.entities, self.ranges = entities, ranges

    def link(self, rng: random.Random, relation: str, subjects: Sequence[int], pool: Sequence[int], p: float) -> None:
        """Give a share `p` of the subjects the relation to members of the pool, dealt evenly, never to itself."""
        dealt = deal(rng, pool)
        for subject in subjects:
            if rng.random() < p and (target := next(dealt, subject)) != subject:
                self.entities[subject].facts[relation] = target

    def value(self, relation: str, subjects: Sequence[int], draw: Callable[[], str]) -> None:
        for subject in subjects:
            self.entities[subject].facts[relation] = draw()


def _people(world: _Table, rng: random.Random, people: range) -> None:
    """Link three generations, so that mothers and advisers are older than their children and students."""
    generations = [people[0::3], people[1::3], people[2::3]]
    for age, members in enumerate(generations):
        world.value("born_year", members, lambda age=age: str(1880 + 33 * age + below(rng, 16)))  # type: ignore[misc]
        if age:
            women = [i for i in generations[age - 1] if world.entities[i].facts["pronoun"] == "she"]
            world.link(rng, "mother", members, women, 0.6)
            world.link(rng, "adviser", members, generations[age - 1], 0.4)
    world.link(rng, "born_in", people, world.ranges["town"], 1.0)
    world.link(rng, "educated_at", people, world.ranges["institute"], 0.5)


def _companies(world: _Table, rng: random.Random, companies: range) -> None:
    world.link(rng, "founder", companies, world.ranges["person"], 1.0)
    world.link(rng, "headquartered_in", companies, world.ranges["town"], 1.0)
    world.link(rng, "acquired_by", companies[0::2], companies, 0.6)
    world.link(rng, "successor", companies[1::4], companies, 0.6)
    world.value("founded_year", companies, lambda: str(1900 + below(rng, 95)))


def _filings(world: _Table, rng: random.Random, filings: range) -> None:
    world.link(rng, "signed_by", filings, world.ranges["person"], 1.0)
    tenths = sorted(below(rng, 9000) + 30 for _ in range(AMOUNTS))
    amounts = [f"{tenth / 10:.1f} million crowns" for tenth in tenths]
    world.value("revenue", filings, lambda: pick(rng, amounts[AMOUNTS // 4 :]))
    world.value("profit", filings, lambda: pick(rng, amounts[: AMOUNTS // 4]))
    world.value("employees", filings, lambda: f"{120 + below(rng, 8800):,}")
    for index in filings:
        entity = world.entities[index]
        if entity.model is not None:
            entity.facts["signed_by"] = world.entities[entity.model].facts["signed_by"]


def _patents(world: _Table, rng: random.Random, patents: range) -> None:
    world.link(rng, "inventor", patents, world.ranges["person"], 1.0)
    world.link(rng, "assignee", patents, world.ranges["company"], 1.0)
    world.value("filed_year", patents, lambda: str(1950 + below(rng, 65)))
    world.value("objection", patents, lambda: "did")
    for index in patents:
        entity = world.entities[index]
        if entity.model is None:
            continue
        year = str(int(str(world.entities[entity.model].facts["filed_year"])) + 1)
        entity.facts.update(world.entities[entity.model].facts)
        entity.facts.update({"filed_year": year} if rng.random() < 0.5 else {"objection": "did not"})


def _places(world: _Table, rng: random.Random, towns: range) -> None:
    rivers, institutes = world.ranges["river"], world.ranges["institute"]
    world.link(rng, "river", towns, rivers, 1.0)
    world.link(rng, "mayor", towns, world.ranges["person"], 0.7)
    world.value("population", towns, lambda: f"{1000 + below(rng, 80_000):,}")
    world.value("length", rivers, lambda: f"{30 + below(rng, 700)} kilometres")
    world.value("source", rivers, lambda: f"the {names.stem(rng)} Hills")
    for position, river in enumerate(rivers):
        if position and rng.random() < 0.8:
            world.entities[river].facts["flows_into"] = rivers[below(rng, position)]
    world.link(rng, "located_in", institutes, towns, 1.0)
    world.link(rng, "director", institutes, world.ranges["person"], 1.0)
    world.value("opened_year", institutes, lambda: str(1820 + below(rng, 150)))


def _works(world: _Table, rng: random.Random, films: range) -> None:
    people, books = world.ranges["person"], world.ranges["book"]
    world.link(rng, "film_director", films, people, 1.0)
    world.link(rng, "composer", films, people, 0.8)
    world.link(rng, "based_on", films, books, 0.6)
    world.link(rng, "filmed_in", films, world.ranges["town"], 1.0)
    world.value("release_year", films, lambda: str(1935 + below(rng, 85)))
    world.link(rng, "author", books, people, 1.0)
    world.link(rng, "publisher", books, world.ranges["company"], 1.0)
    world.value("published_year", books, lambda: str(1905 + below(rng, 110)))


FILLERS: dict[Kind, Callable[[_Table, random.Random, range], None]] = {
    "person": _people, "company": _companies, "filing": _filings, "patent": _patents, "town": _places, "film": _works,
}  # fmt: skip
