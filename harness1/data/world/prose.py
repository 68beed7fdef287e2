"""Writes documents about entities: each fact in one of several phrasings (`prose.toml`), among true but useless detail.

Questions use other words for the same relations (`questions.toml`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import resources

import msgspec

from harness1.data.world.facts import Entity, Kind
from harness1.data.world.names import below, pick
from harness1.records import Record


class _Sentences(Record):
    statements: dict[str, tuple[str, ...]]
    openings: dict[Kind, tuple[str, ...]]
    details: dict[Kind, tuple[str, ...]]
    nouns: dict[Kind, str]
    swaps: dict[str, str]


_SENTENCES = msgspec.toml.decode(resources.files(__package__).joinpath("prose.toml").read_bytes(), type=_Sentences)
STATEMENTS, OPENINGS, DETAILS = _SENTENCES.statements, _SENTENCES.openings, _SENTENCES.details
NOUNS, SWAPS = _SENTENCES.nouns, _SENTENCES.swaps
UNSTATED = {"pronoun", "period"}


def compose(entity: Entity, entities: Sequence[Entity], towns: range) -> str:
    """Write the document of an entity: an opening, its facts in any order, and two to four sentences of detail."""
    rng = random.Random(entity.style)
    sentences = [_state(rng, entity, relation, entities) for relation in entity.facts if relation not in UNSTATED]
    pool = list(DETAILS[entity.kind])
    for _ in range(2 + below(rng, 3)):
        detail = pool.pop(below(rng, len(pool)))
        sentences.append(_fill(detail, entity, _subject(rng, entity), "", _asides(rng, entities, towns)))
    opening = _fill(pick(rng, OPENINGS[entity.kind]), entity, entity.name, "", {})
    return " ".join([opening, *_shuffled(rng, sentences)])


def _state(rng: random.Random, entity: Entity, relation: str, entities: Sequence[Entity]) -> str:
    target = entity.facts[relation]
    shown = entities[target].name if isinstance(target, int) else target
    return _fill(pick(rng, STATEMENTS[relation]), entity, _subject(rng, entity), shown, {})


def _subject(rng: random.Random, entity: Entity) -> str:
    """Return the subject of a sentence: the full name once in three times."""
    short = str(entity.facts["pronoun"]) if entity.kind == "person" else NOUNS[entity.kind]
    full = f"the {entity.name}" if entity.kind in ("filing", "river", "institute") else entity.name
    return full if rng.random() < 0.33 else short


def _fill(template: str, entity: Entity, subject: str, shown: str, asides: dict[str, str]) -> str:
    female = entity.facts.get("pronoun") == "she"
    text = template.format(s=subject, n=entity.name, o=shown, t=entity.title, them="her" if female else "him",
                           child="daughter" if female else "son", **asides)  # fmt: skip
    return text[0].upper() + text[1:]


def _asides(rng: random.Random, entities: Sequence[Entity], towns: range) -> dict[str, str]:
    return {
        "year": str(1890 + below(rng, 130)),
        "amount": f"{below(rng, 900) / 10 + 3:.1f} million crowns",
        "count": f"{110 + below(rng, 9000):,}",
        "small": str(2 + below(rng, 17)),
        "town": entities[pick(rng, towns)].name,
    }


def _shuffled(rng: random.Random, items: list[str]) -> list[str]:
    return [item for _, item in sorted((rng.random(), item) for item in items)]


def republish(text: str, rng: random.Random) -> str:
    """Return the text with one function word changed: a near duplicate. A text without such a word stays as it is."""
    words = text.split(" ")
    places = [at for at, word in enumerate(words) if word in SWAPS]
    if places:
        at = pick(rng, places)
        words[at] = SWAPS[words[at]]
    return " ".join(words)
