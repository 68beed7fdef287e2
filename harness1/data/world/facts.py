"""The fact table of a synthetic world: entities of nine kinds, linked by relations.

A fact belongs to one entity, and only the document of that entity states it, which makes every document of a chain of
facts necessary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from harness1.data.world.names import below

Kind = Literal["person", "company", "filing", "patent", "town", "river", "institute", "film", "book"]
SHARES: dict[Kind, float] = {
    "company": 0.16, "filing": 0.16, "patent": 0.09, "town": 0.11, "river": 0.04, "institute": 0.04, "film": 0.05,
    "book": 0.05, "person": 0.30,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entity:
    """One thing of the world. `facts` maps a relation to the index of another entity, or to a plain value.

    `style` seeds the wording of its document: look-alikes share it. `model` is the index of the entity that this one
    resembles: its document is worded the same and differs in numbers, dates or a negation.
    """

    index: int
    kind: Kind
    name: str
    title: str
    style: str
    facts: dict[str, int | str]
    model: int | None = None


def deal(rng: random.Random, pool: Sequence[int]) -> Iterator[int]:
    """Yield the pool in a scattered order, again and again, so that every member is dealt equally often."""
    if not pool:
        return
    step = coprime(rng, len(pool))
    at = below(rng, len(pool))
    while True:
        yield pool[at % len(pool)]
        at += step


def coprime(rng: random.Random, count: int) -> int:
    """Return a number in [1, count] that shares no divisor with `count`."""
    step = 1 + below(rng, count)
    while math.gcd(step, count) != 1:
        step = step % count + 1
    return step


def kind_ranges(count: int) -> dict[Kind, range]:
    """Return the indices of each kind of entity; people take what the others leave."""
    ranges: dict[Kind, range] = {}
    start = 0
    for kind, share in SHARES.items():
        size = count - start if kind == "person" else max(1 if kind != "town" else 2, int(count * share))
        ranges[kind] = range(start, start + size)
        start += size
    return ranges
