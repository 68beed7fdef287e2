"""A synthetic world as a corpus with gold: of any size, with the same bytes for the same arguments on every machine.
Documents state each fact in one of several phrasings (`world_prose.toml`); questions use other words for the same
relations (`world_questions.toml`), and are walks over the fact table on which every step has exactly one outcome."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import resources
from itertools import islice
from typing import NamedTuple

import msgspec

from harness1.data.source import Source
from harness1.data.world_facts import Casting, Entity, Kind, below, coprime, deal, kind_ranges, link_entities, pick
from harness1.errors import UsageError
from harness1.records import DocId, Gold, Record, Task
from harness1.retrieval.corpus import Document


class _Sentences(Record):
    statements: dict[str, tuple[str, ...]]
    openings: dict[Kind, tuple[str, ...]]
    details: dict[Kind, tuple[str, ...]]
    nouns: dict[Kind, str]
    swaps: dict[str, str]


PROSE = msgspec.toml.decode(resources.files(__package__).joinpath("world_prose.toml").read_bytes(), type=_Sentences)
UNSTATED = {"pronoun", "period"}


def compose(entity: Entity, entities: Sequence[Entity], towns: range) -> str:
    """Write the document of an entity: an opening, its facts in any order, and two to four sentences of detail."""
    rng = random.Random(entity.style)
    sentences = []
    for relation, target in entity.facts.items():
        if relation not in UNSTATED:
            shown = entities[target].name if isinstance(target, int) else target
            sentences.append(_fill(pick(rng, PROSE.statements[relation]), entity, _subject(rng, entity), shown, {}))
    pool = list(PROSE.details[entity.kind])
    for _ in range(2 + below(rng, 3)):
        detail = pool.pop(below(rng, len(pool)))
        subject = _subject(rng, entity)
        asides = {
            "year": str(1890 + below(rng, 130)),
            "amount": f"{below(rng, 900) / 10 + 3:.1f} million crowns",
            "count": f"{110 + below(rng, 9000):,}",
            "small": str(2 + below(rng, 17)),
            "town": entities[pick(rng, towns)].name,
        }
        sentences.append(_fill(detail, entity, subject, "", asides))
    opening = _fill(pick(rng, PROSE.openings[entity.kind]), entity, entity.name, "", {})
    return " ".join([opening, *(sentence for _, sentence in sorted((rng.random(), each) for each in sentences))])


def _subject(rng: random.Random, entity: Entity) -> str:
    short = str(entity.facts["pronoun"]) if entity.kind == "person" else PROSE.nouns[entity.kind]
    full = f"the {entity.name}" if entity.kind in ("filing", "river", "institute") else entity.name
    return full if rng.random() < 0.33 else short


def _fill(template: str, entity: Entity, subject: str, shown: str, asides: dict[str, str]) -> str:
    female = entity.facts.get("pronoun") == "she"
    text = template.format(s=subject, n=entity.name, o=shown, t=entity.title, them="her" if female else "him",
                           child="daughter" if female else "son", **asides)  # fmt: skip
    return text[0].upper() + text[1:]


def republish(text: str, rng: random.Random) -> str:
    """Return the text with one function word changed: a near duplicate. A text without such a word stays as it is."""
    words = text.split(" ")
    places = [at for at, word in enumerate(words) if word in PROSE.swaps]
    if places:
        at = pick(rng, places)
        words[at] = PROSE.swaps[words[at]]
    return " ".join(words)


class Wording(Record):
    """The question for a relation, as a noun phrase and in full, with and against its direction (`questions.toml`)."""

    one: str = ""
    ask: str = ""
    other: str = ""
    ask_other: str = ""


WORDINGS = msgspec.toml.decode(
    resources.files(__package__).joinpath("world_questions.toml").read_bytes(), type=dict[str, Wording]
)
MENTIONS: dict[Kind, str] = {"filing": "the {}", "river": "the {}", "institute": "the {}", "film": "the film {}",
                             "book": "the book {}"}  # fmt: skip


class Hop(NamedTuple):
    """One relation followed. `inverse`: against its direction. `period` picks one filing of a company."""

    relation: str
    inverse: bool = False
    period: str = ""


class WorldQuestion(NamedTuple):
    """A chain of facts to find. `documents` are the indices of the entities whose documents state them, in order."""

    start: int
    steps: tuple[Hop, ...]
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
        steps: list[Hop] = []
        while True:
            options = list(self.options(at, visited, last=len({*documents, at}) == hops))
            if len(documents) == hops:
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

    def options(self, at: int, visited: Sequence[int], last: bool) -> Iterator[tuple[Hop, int | str]]:
        """Yield the steps that can be asked for from an entity, with their results; only those with one outcome."""
        for relation, target in self.entities[at].facts.items() if at not in self.reserved else ():
            is_asked = relation in WORDINGS and WORDINGS[relation].ask
            if is_asked and (last if isinstance(target, str) else target not in visited):
                yield Hop(relation), target
        for relation, sources in self.pointing.get(at, {}).items():
            if relation == "filed_by":
                for source in sources:
                    if source not in visited and source not in self.reserved:
                        yield Hop(relation, inverse=True, period=str(self.entities[source].facts["period"])), source
            elif WORDINGS[relation].other and len(sources) == 1 and sources[0] not in {*visited, *self.reserved}:
                yield Hop(relation, inverse=True), sources[0]

    def finish(
        self, start: int, steps: Sequence[Hop], documents: Sequence[int], answer: str, known: Sequence[int]
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
    """Yield different questions, as evenly over 1 to 4 hops and the kinds of starting entities as the world allows."""
    pools = list(kind_ranges(len(walker.entities)).values())
    found: set[tuple[int, tuple[Hop, ...]]] = set()
    for attempt in range(40 * wanted + 400):
        start = pick(rng, pools[below(rng, len(pools))])
        question = walker.draw(rng, start, hops=1 + attempt % 4)
        if question is not None and (start, question.steps) not in found:
            found.add((start, question.steps))
            yield question


def questions_about_people(walker: Walker, rng: random.Random) -> Iterator[WorldQuestion]:
    """Yield a question for each person that another document names in a role: about what only the person's own
    states."""
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
        question = walker.finish(start, [Hop(relation), step], [start, person], answer, [start, person])
        if question is not None:
            yield question


def by_split(found: Iterable[WorldQuestion], wanted: Mapping[str, int]) -> dict[str, list[WorldQuestion]]:
    """Divide questions among splits of the sizes wanted until all are full; equal evidence goes to one split."""
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


SMALLEST = 20
EDITION = "2"  # incremented whenever the same arguments give another world
SPLITS = ("train", "dev", "test")
HELD_OUT_CAP = 1000
TRAIN_CAP = 8000
COPY_SHARE = 0.04
COPY_WORDS = range(70, 101)
"""Words of a document that may be republished. The changed word is 1 to 1.4 % of them, so that the two documents share
more than 0.85 of their five-word shingles."""


class SyntheticWorld:
    """Exactly `size` documents about invented entities; those of `copied` have near duplicates, and are never
    evidence."""

    def __init__(self, size: int, seed: int = 0, about: str = "") -> None:
        if size < SMALLEST:
            raise UsageError(f"a synthetic world has at least {SMALLEST} documents, not {size}")
        copies = max(1, round(size * COPY_SHARE))
        ranges = kind_ranges(size - copies)
        self.seed, self.about = seed, about
        self.entities, self.copied = Casting(ranges, seed).entities, list[int]()
        link_entities(self.entities, ranges, seed)
        rng = random.Random(f"world/{seed}/copies")
        for index in islice(deal(rng, range(len(self.entities))), len(self.entities)):
            text = compose(self.entities[index], self.entities, ranges["town"])
            if len(text.split()) in COPY_WORDS and republish(text, rng) != text:
                self.copied.append(index)
            if len(self.copied) == copies:
                break
        self.size = len(self.entities) + len(self.copied)
        self._step = coprime(random.Random(f"world/{seed}/ids"), self.size)
        self._shift = below(random.Random(f"world/{seed}/shift"), self.size)

    def documents(self) -> Iterator[Document]:
        """Yield every document, in the order of its id; those after the last entity are near duplicates."""
        towns, inverse = kind_ranges(len(self.entities))["town"], pow(self._step, -1, self.size)
        for place in range(self.size):
            position = (place - self._shift) * inverse % self.size
            copy = position - len(self.entities)
            entity = self.entities[position if copy < 0 else self.copied[copy]]
            text = compose(entity, self.entities, towns)
            if copy >= 0:
                text = republish(text, random.Random(f"{entity.style}/copy"))
            yield Document(doc_id=self.doc_id(position), title=entity.title, text=text)

    def doc_id(self, position: int) -> DocId:
        """Return the id of a document. Ids are scattered, so that they say nothing about the entity."""
        return DocId(f"w{(position * self._step + self._shift) % self.size:07d}")

    @cached_property
    def tasks(self) -> dict[str, list[Task]]:
        """Return the tasks of every split; no chain of facts is asked for twice, and no splits share evidence."""
        held_out = min(HELD_OUT_CAP, self.size // 4)
        wanted = {"dev": held_out, "test": held_out, "train": min(TRAIN_CAP, self.size)}

        def draw() -> Iterator[WorldQuestion]:
            walker = Walker(self.entities, frozenset(self.copied))
            rng = random.Random(f"world/{self.seed}/questions")
            return questions_about_people(walker, rng) if self.about else questions(walker, rng, sum(wanted.values()))

        found = by_split(draw(), wanted)
        if len(found["train"]) < wanted["train"]:
            everything = list(draw())
            share = len(everything) // 6
            found = by_split(everything, {"dev": share, "test": share, "train": len(everything)})
        return {split: [self._task(split, n, question) for n, question in enumerate(found[split])] for split in found}

    def _task(self, split: str, number: int, question: WorldQuestion) -> Task:
        evidence = [self.doc_id(index) for index in question.documents]
        gold = Gold(relevant=dict.fromkeys(evidence, 1), answer_docs=(evidence[-1],), answers=(question.answer,))
        chain = [[step.relation, "inverse" if step.inverse else "forward", step.period] for step in question.steps]
        start = self.entities[question.start].name
        metadata = {"hops": len(evidence), "answer": question.answer, "start": start, "chain": chain}
        return Task(f"{split}-{number:05d}", question.text, split, gold, metadata)


def world_source(size: int, seed: int = 0, about: str = "") -> Source:
    """Open a synthetic world of `size` documents. Dev and test have up to min(1000, size // 4) tasks each and train
    up to min(8000, size). `about`: `people` for questions that two documents answer, the second of which they do not
    name."""
    world = SyntheticWorld(size, seed, about)
    name, label = "-".join(map(str, filter(None, (f"world-{size}-{seed}", about)))), "a synthetic world"
    return Source(
        name, "world", world.documents, SPLITS, lambda split: world.tasks[split], edition=EDITION, label=label
    )
