"""Draws questions with known evidence: walks over the fact table on which every step has exactly one outcome."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import msgspec

from harness1.data.world.facts import Entity, Kind
from harness1.data.world.names import below, pick
from harness1.records import Record


class Wording(Record):
    """The question for a relation, as a noun phrase and in full, with and against its direction (`questions.toml`)."""

    one: str = ""
    ask: str = ""
    other: str = ""
    ask_other: str = ""


WORDINGS = msgspec.toml.decode(
    resources.files(__package__).joinpath("questions.toml").read_bytes(), type=dict[str, Wording]
)
MENTIONS: dict[Kind, str] = {"filing": "the {}", "river": "the {}", "institute": "the {}", "film": "the film {}",
                             "book": "the book {}"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One relation followed. `inverse`: against its direction. `period` picks one filing of a company."""

    relation: str
    inverse: bool = False
    period: str = ""


@dataclass(frozen=True, slots=True)
class WorldQuestion:
    """A chain of facts to find. `documents` are the indices of the entities whose documents state them, in order."""

    start: int
    steps: tuple[Step, ...]
    documents: tuple[int, ...]
    answer: str
    text: str


class Walker:
    """Draws questions from a fact table. Entities in `reserved` are never evidence."""

    def __init__(self, entities: Sequence[Entity], reserved: frozenset[int]) -> None:
        self.entities, self.reserved = entities, reserved
        self.pointing: dict[int, dict[str, list[int]]] = {}
        for entity in entities:
            for relation, target in entity.facts.items():
                if isinstance(target, int):
                    self.pointing.setdefault(target, {}).setdefault(relation, []).append(entity.index)

    def draw(self, rng: random.Random, start: int, hops: int) -> WorldQuestion | None:
        """Draw a question from one entity that takes `hops` documents to answer, or None if the walk failed."""
        at, visited = start, [start]
        documents: list[int] = []
        steps: list[Step] = []
        while True:
            options = list(self.options(at, visited, last=len({*documents, at}) == hops))
            full = len(documents) == hops
            if full:
                options = [option for option in options if not option[0].inverse and at in documents]
                if steps and (not options or rng.random() < 0.3):
                    return self.finish(start, steps, documents, self.entities[at].name, visited[:-1])
            if not options:
                return None
            step, target = pick(rng, options)
            source = target if step.inverse and isinstance(target, int) else at
            steps.append(step)
            if source not in documents:
                documents.append(source)
            if isinstance(target, str):
                return self.finish(start, steps, documents, target, visited) if len(documents) == hops else None
            at = target
            visited.append(at)
            if len(documents) == hops and not step.inverse:
                return self.finish(start, steps, documents, self.entities[at].name, visited[:-1])

    def options(self, at: int, visited: Sequence[int], last: bool) -> Iterator[tuple[Step, int | str]]:
        """Yield the steps that can be asked for from an entity, with their results; only those with one outcome."""
        for relation, target in self.entities[at].facts.items():
            wording = WORDINGS.get(relation)
            if wording is None or not wording.ask or at in self.reserved:
                continue
            if last if isinstance(target, str) else target not in visited:
                yield Step(relation), target
        for relation, sources in self.pointing.get(at, {}).items():
            if relation == "filed_by":
                for source in sources:
                    if source not in visited and source not in self.reserved:
                        yield Step(relation, inverse=True, period=str(self.entities[source].facts["period"])), source
            elif WORDINGS[relation].other and len(sources) == 1 and sources[0] not in {*visited, *self.reserved}:
                yield Step(relation, inverse=True), sources[0]

    def finish(
        self, start: int, steps: Sequence[Step], documents: Sequence[int], answer: str, known: Sequence[int]
    ) -> WorldQuestion | None:
        """Return the question in words, or None if its own words give away the answer or an entity on the way."""
        entity, last = self.entities[start], steps[-1]
        phrase = MENTIONS.get(entity.kind, "{}").format(entity.name)
        for step in steps[:-1]:
            wording = WORDINGS[step.relation]
            phrase = (wording.other if step.inverse else wording.one).format(x=phrase, q=step.period)
        ask = WORDINGS[last.relation].ask_other if last.inverse else WORDINGS[last.relation].ask
        text = ask.format(x=phrase, q=last.period)
        hidden = [self.entities[index].name for index in known if index != start]
        if not ask or any(name in text for name in [answer, *hidden]):
            return None
        return WorldQuestion(start, tuple(steps), tuple(documents), answer, text)


def questions(walker: Walker, rng: random.Random, wanted: int) -> Iterator[WorldQuestion]:
    """Yield different questions, as evenly over 1 to 4 hops and over the kinds of starting entities as the world
    allows: more than `wanted`, except in a small world."""
    by_kind: dict[Kind, list[int]] = {}
    for entity in walker.entities:
        by_kind.setdefault(entity.kind, []).append(entity.index)
    pools = list(by_kind.values())
    found: set[tuple[int, tuple[Step, ...]]] = set()
    for attempt in range(40 * wanted + 400):
        start = pick(rng, pools[below(rng, len(pools))])
        question = walker.draw(rng, start, hops=1 + attempt % 4)
        if question is not None and (start, question.steps) not in found:
            found.add((start, question.steps))
            yield question


def questions_about_people(walker: Walker, rng: random.Random) -> Iterator[WorldQuestion]:
    """Yield, in a scattered order, one question for every person that the document of something else names in a role:
    about what only the person's own document states."""
    named = [
        (rng.random(), entity.index, relation, target)
        for entity in walker.entities
        for relation, target in entity.facts.items()
        if entity.kind != "person" and isinstance(target, int) and walker.entities[target].kind == "person"
    ]
    for _, start, relation, person in sorted(named):
        asked = [each for each in walker.options(person, [start, person], last=True) if not each[0].inverse]
        if not asked or start in walker.reserved:
            continue
        step, found = pick(rng, asked)
        answer = found if isinstance(found, str) else walker.entities[found].name
        question = walker.finish(start, [Step(relation), step], [start, person], answer, [start, person])
        if question is not None:
            yield question


def by_split(found: Iterable[WorldQuestion], wanted: Mapping[str, int]) -> dict[str, list[WorldQuestion]]:
    """Divide questions among splits of the sizes wanted, in their order, until all are full.

    Questions with the same evidence go to one split, that of the first; what it has no room for is left out.
    """
    owner: dict[frozenset[int], str] = {}
    splits: dict[str, list[WorldQuestion]] = {split: [] for split in wanted}
    for question in found:
        room = [split for split in wanted if len(splits[split]) < wanted[split]]
        if not room:
            break
        split = owner.setdefault(frozenset(question.documents), room[0])
        if split in room:
            splits[split].append(question)
    return splits
