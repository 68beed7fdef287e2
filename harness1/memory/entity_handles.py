"""Entity handles: short names such as E3 that queries may use for what the question and the shown documents name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from harness1.memory.entities import extract
from harness1.memory.evidence import entity_key
from harness1.memory.forkable import Forkable

_HANDLE = re.compile(r"\bE[1-9][0-9]{0,5}\b")
_QUESTION = re.compile(r"\bQ\b")
_EITHER = re.compile(rf"{_HANDLE.pattern}|{_QUESTION.pattern}")
_HANDLES = re.compile(rf"(?:(?:{_EITHER.pattern})[ ,;]*)+")
QUESTION = "Q"
"""The handle of the question."""


class Mention(NamedTuple):
    """The first mention of an entity in a text: its name as written, and the position behind it."""

    end: int
    name: str


class EntityHandles(Forkable):
    """The entities shown so far in an episode, in order of first appearance: E1 is the first of `names`.

    Forms that differ in case, the dots of an acronym or a possessive ending are one entity; the first form is its name.
    A handle never changes. The fields are an index to read through the methods; only `add` writes them.
    """

    names: list[str] = []
    numbers: dict[str, int] = {}
    """Key of an entity -> the number in its handle, from 1."""

    def add(self, names: Iterable[str]) -> None:
        """Give handles to the entities that have none yet."""
        for name in names:
            if (key := entity_key(name)) and key not in self.numbers:
                self.names.append(name)
                self.numbers[key] = len(self.names)

    def handle_of(self, name: str) -> str:
        """Return the handle of an entity in any form of its name, or an empty string."""
        number = self.numbers.get(entity_key(name))
        return "" if number is None else f"E{number}"

    def marked(self, text: str, characters: int) -> tuple[str, dict[str, str]]:
        """Return a text with ` (E3)` behind the first mention of each entity that has a handle, and the names that
        these handles stand for, as the text writes them. `characters` is as in `mentions`."""
        if not self.numbers:
            return text, {}
        parts: list[str] = []
        shown: dict[str, str] = {}
        done = 0
        for mention in mentions(text, characters):
            number = self.numbers.get(entity_key(mention.name))
            if number is None or (handle := f"E{number}") in shown:
                continue
            shown[handle] = mention.name
            parts.append(f"{text[done : mention.end]} ({handle})")
            done = mention.end
        return "".join([*parts, text[done:]]), shown

    def spelled(self, query: str, question: str = "") -> SpelledQuery:
        """Replace the handles in a query with names. Words that look like handles but name nothing stay.

        Args:
            question: what `Q` stands for in a query of handles alone; empty: nothing.
        """
        used = dict.fromkeys(_HANDLE.findall(query))
        resolved = {handle: self.names[int(handle[1:]) - 1] for handle in used if int(handle[1:]) <= len(self.names)}
        if question and _HANDLES.fullmatch(query) and _QUESTION.search(query):
            resolved[QUESTION] = question
        text = _EITHER.sub(lambda found: resolved.get(found.group(), found.group()), query)
        unknown = tuple(handle for handle in used if handle not in resolved)
        return SpelledQuery(text, resolved, unknown, not _HANDLE.sub("", query).strip(" ,;") and not resolved)


class SpelledQuery(NamedTuple):
    """A query in words, the names behind its handles, what only looked like a handle, and whether nothing else was in
    it."""

    text: str
    resolved: dict[str, str]
    unknown: tuple[str, ...]
    empty: bool


def mentions(text: str, characters: int) -> list[Mention]:
    """Return the first mention of each entity of a text, in text order, without mere numbers and without names inside
    longer ones.

    Args:
        characters: how much of the text is read.
    """
    names = [name for name in extract(text, characters) if not name.rstrip("s").replace("/", "").isdecimal()]
    taken: list[tuple[int, int]] = []
    for name in sorted(names, key=len, reverse=True):
        place = next((place for place in _places(name, text) if not _overlaps(place, taken)), None)
        if place is not None:
            taken.append(place)
    return [Mention(end, text[start:end]) for start, end in sorted(taken)]


def in_handles(query: str, entities: Mapping[str, str]) -> str:
    """Replace names in a query with their handles, the longest names first.

    Args:
        entities: handle -> name.
    """
    for handle, name in sorted(entities.items(), key=lambda entity: -len(entity[1])):
        query = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", handle, query)
    return query


def _places(name: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans where a name stands as whole words. Searching avoids compiling a pattern for each name."""
    start = text.find(name)
    while start >= 0:
        end = start + len(name)
        if not (_is_word(text[start - 1 : start]) or _is_word(text[end : end + 1])):
            yield start, end
        start = text.find(name, start + 1)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _overlaps(place: tuple[int, int], taken: Iterable[tuple[int, int]]) -> bool:
    return any(place[0] < end and start < place[1] for start, end in taken)
