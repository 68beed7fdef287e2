"""A synthetic world as a corpus with gold: of any size, with the same bytes for the same arguments on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from harness1.data.source import Source
from harness1.data.world.casting import cast_entities
from harness1.data.world.facts import Entity, coprime, deal, kind_ranges
from harness1.data.world.links import link_entities
from harness1.data.world.names import below
from harness1.data.world.prose import compose, republish
from harness1.data.world.questions import Walker, WorldQuestion, by_split, questions, questions_about_people
from harness1.errors import UsageError
from harness1.records import DocId, Gold, Task
from harness1.retrieval.corpus import Document

SMALLEST = 20
EDITION = "2"
"""Incremented whenever the same arguments give another world."""
SPLITS = ("train", "dev", "test")
HELD_OUT_CAP = 1000
TRAIN_CAP = 8000
COPY_SHARE = 0.04
COPY_WORDS = range(70, 101)
"""Words of a document that may be republished. The changed word is 1 to 1.4 % of them, so that the two documents share
more than 0.85 of their five-word shingles."""


@dataclass(frozen=True)
class SyntheticWorld:
    """`size` documents about invented entities. Build one with `build_world`.

    `copied` holds the entities whose document appears twice; they are never evidence of a question.
    """

    size: int
    seed: int
    entities: list[Entity]
    copied: tuple[int, ...]
    about: str = ""
    """What questions are about: "" for everything, or `people`."""

    def documents(self) -> Iterator[Document]:
        """Yield every document, in the order of its id."""
        for place in range(self.size):
            position = (place - self._shift) * pow(self._step, -1, self.size) % self.size
            yield self.document(position)

    def document(self, position: int) -> Document:
        """Return the document of an entity, or, after the last entity, the near duplicate of one."""
        copy = position - len(self.entities)
        entity = self.entities[position if copy < 0 else self.copied[copy]]
        text = compose(entity, self.entities, self._towns)
        if copy >= 0:
            text = republish(text, random.Random(f"{entity.style}/copy"))
        return Document(doc_id=self.doc_id(position), title=entity.title, text=text)

    def doc_id(self, position: int) -> DocId:
        """Return the id of a document. Ids are scattered, so that they say nothing about the entity."""
        return DocId(f"w{(position * self._step + self._shift) % self.size:07d}")

    @cached_property
    def tasks(self) -> dict[str, list[Task]]:
        """Return the tasks of every split. No chain of facts is asked for twice, and no two splits share a set of
        evidence."""
        held_out = min(HELD_OUT_CAP, self.size // 4)
        wanted = {"dev": held_out, "test": held_out, "train": min(TRAIN_CAP, self.size)}
        found = by_split(self._questions(sum(wanted.values())), wanted)
        if len(found["train"]) < wanted["train"]:
            everything = list(self._questions(sum(wanted.values())))
            share = len(everything) // 6
            found = by_split(everything, {"dev": share, "test": share, "train": len(everything)})
        return {split: [self._task(split, n, question) for n, question in enumerate(found[split])] for split in found}

    def _questions(self, wanted: int) -> Iterator[WorldQuestion]:
        walker = Walker(self.entities, frozenset(self.copied))
        rng = random.Random(f"world/{self.seed}/questions")
        return questions_about_people(walker, rng) if self.about else questions(walker, rng, wanted)

    def _task(self, split: str, number: int, question: WorldQuestion) -> Task:
        evidence = [self.doc_id(index) for index in question.documents]
        gold = Gold(relevant=dict.fromkeys(evidence, 1), answer_docs=(evidence[-1],), answers=(question.answer,))
        chain = [[step.relation, "inverse" if step.inverse else "forward", step.period] for step in question.steps]
        start = self.entities[question.start].name
        metadata = {"hops": len(evidence), "answer": question.answer, "start": start, "chain": chain}
        return Task(f"{split}-{number:05d}", question.text, split, gold, metadata)

    @cached_property
    def _towns(self) -> range:
        return kind_ranges(len(self.entities))["town"]

    @cached_property
    def _step(self) -> int:
        return coprime(random.Random(f"world/{self.seed}/ids"), self.size)

    @cached_property
    def _shift(self) -> int:
        return below(random.Random(f"world/{self.seed}/shift"), self.size)


def build_world(size: int, seed: int = 0, about: str = "") -> SyntheticWorld:
    """Build a world of exactly `size` documents, about 4 % of them near duplicates.

    Raises:
        UsageError: `size` is below 20.
    """
    if size < SMALLEST:
        raise UsageError(f"a synthetic world has at least {SMALLEST} documents, not {size}")
    copies = max(1, round(size * COPY_SHARE))
    ranges = kind_ranges(size - copies)
    entities = cast_entities(ranges, seed)
    link_entities(entities, ranges, seed)
    copied = _choose_copied(entities, ranges["town"], copies, random.Random(f"world/{seed}/copies"))
    return SyntheticWorld(len(entities) + len(copied), seed, entities, tuple(copied), about)


def _choose_copied(entities: list[Entity], towns: range, copies: int, rng: random.Random) -> list[int]:
    """Return scattered entities whose documents can be republished."""
    copied: list[int] = []
    for index in islice(deal(rng, range(len(entities))), len(entities)):
        text = compose(entities[index], entities, towns)
        if len(text.split()) in COPY_WORDS and republish(text, rng) != text:
            copied.append(index)
        if len(copied) == copies:
            break
    return copied


def world_source(size: int, seed: int = 0, about: str = "") -> Source:
    """Open a synthetic world as a source of `size` documents and of the splits train, dev and test.

    Dev and test have up to min(1000, size // 4) tasks each and train up to min(8000, size); where a small world has
    fewer questions, dev and test get a sixth of them each.

    Args:
        about: `people` for questions that two documents answer together, the second of which they do not name: one of a
            person whom the first one names ("In which year was the founder of Velmark Glass born?").

    Raises:
        UsageError: `size` is below 20.
    """
    world = build_world(size, seed, about)
    name, label = "-".join(map(str, filter(None, (f"world-{size}-{seed}", about)))), "a synthetic world"
    return Source(
        name, "world", world.documents, SPLITS, lambda split: world.tasks[split], edition=EDITION, label=label
    )
