"""Casts a synthetic world: gives every entity its name, and look-alikes their model."""

from __future__ import annotations

import random

from harness1.data.world import names
from harness1.data.world.facts import Entity, Kind
from harness1.data.world.names import Register, below, pick

PERIODS = ("annual", "first-quarter", "second-quarter", "third-quarter")
INVENTIONS = ("rotary seal", "folding mast", "optical relay", "grain dryer", "tidal valve", "paper sensor",
              "cable brake", "heat exchanger", "loom shuttle", "ice drill", "sound damper", "lens mount")  # fmt: skip
USES = ("cold pumps", "small ferries", "tall chimneys", "deep wells", "night trains", "greenhouses", "pipe organs")
SEXES = ("she", "he")


def cast_entities(ranges: dict[Kind, range], seed: int) -> list[Entity]:
    """Return the entities of a world in the order of their indices, with distinct names and without relations, except
    for the company of a filing."""
    return _Casting(ranges, seed).entities


class _Casting:
    def __init__(self, ranges: dict[Kind, range], seed: int) -> None:
        self.seed, self.ranges, self.register = seed, ranges, Register()
        rng = random.Random(f"world/{seed}/lists")
        self.surnames = [names.stem(rng) for _ in range(max(4, len(ranges["person"]) // 4))]
        self.regions = [names.stem(rng) for _ in range(max(2, len(ranges["town"]) // 12))]
        firsts = max(6, min(500, len(ranges["person"]) // 8))
        self.firsts = {sex: [names.first_name(rng, sex == "she") for _ in range(firsts)] for sex in SEXES}
        self.entities: list[Entity] = []
        for kind, indices in ranges.items():
            rng = random.Random(f"world/{seed}/{kind}")
            for index in indices:
                self.entities.append(self.entity(rng, kind, index))

    def style(self, index: int) -> str:
        return f"world/{self.seed}/prose/{index}"

    def entity(self, rng: random.Random, kind: Kind, index: int) -> Entity:
        previous = self.entities[-1] if self.entities and self.entities[-1].kind == kind else None
        if kind == "filing":
            return self.filing(rng, index, previous)
        if kind == "patent":
            return self.patent(rng, index, previous)
        facts: dict[str, int | str] = {"pronoun": pick(rng, SEXES)} if kind == "person" else {}
        while True:
            name = self.name(rng, kind, previous, facts)
            if self.register.claim(name):
                return Entity(index, kind, name, name, self.style(index), facts)

    def name(self, rng: random.Random, kind: Kind, previous: Entity | None, facts: dict[str, int | str]) -> str:
        alike = previous is not None and rng.random() < 0.15
        if kind == "person":
            return names.person(rng, pick(rng, self.firsts[str(facts["pronoun"])]), self.surnames)
        if kind == "company":
            return names.resembling(rng, previous.name) if alike and previous else names.company(rng)
        if kind == "town":
            place = previous.name.partition(",")[0] if alike and previous else names.stem(rng)
            return f"{place}, {pick(rng, self.regions)}"
        if kind == "river":
            return f"River {names.stem(rng)}"
        return names.institute(rng) if kind == "institute" else names.work_title(rng)

    def filing(self, rng: random.Random, index: int, previous: Entity | None) -> Entity:
        """Return a report. Two of three follow the one before: the same company and wording, another period."""
        company, model = pick(rng, self.ranges["company"]), None
        if previous and rng.random() < 0.66:
            company, model = int(previous.facts["filed_by"]), previous
        while True:
            period = f"{1996 + below(rng, 28)} {pick(rng, PERIODS)}"
            name = f"{period} report of {self.entities[company].name}"
            if self.register.claim(name):
                break
            company, model = pick(rng, self.ranges["company"]), None
        facts: dict[str, int | str] = {"filed_by": company, "period": period}
        if model is None:
            return Entity(index, "filing", name, name, self.style(index), facts)
        return Entity(index, "filing", name, name, model.style, facts, model.index)

    def patent(self, rng: random.Random, index: int, previous: Entity | None) -> Entity:
        """Return a patent. Two of five continue the one before: the same title and wording, another number, and another
        year or an objection where there was none."""
        number = f"patent KX{4_000_000 + index * 7 + below(rng, 7)}"
        self.register.claim(number)
        if previous and previous.model is None and rng.random() < 0.4:
            return Entity(index, "patent", number, previous.title, previous.style, {}, previous.index)
        title = f"{names.stem(rng)} {pick(rng, INVENTIONS)} for {pick(rng, USES)}"
        return Entity(index, "patent", number, title, self.style(index), {})
