"""Entities: names, years and dates, which link one document to another. Their extraction, the graph of the units that
mention them, and the handles (`E3`) by which queries may name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from heapq import nsmallest
from typing import NamedTuple, Self

from harness1.memory.parts import Forkable
from harness1.memory.sentences import UPPER, WORDS
from harness1.records import Record, UnitId

FUNCTION_WORDS, _COMMON = WORDS["function"], WORDS["common"]
_CALENDAR = WORDS["months"] | WORDS["days"] | WORDS["calendar"]
_OPENINGS = FUNCTION_WORDS | _CALENDAR
_ACRONYMS = frozenset(("US", "WHO"))
_CONTRACTIONS = frozenset(("t", "s", "m", "d", "ll", "re", "ve"))
_LONGEST = 100
_SENTENCE_BREAKS = ".!?:;\n\r\t•*|-–—"

_U = f"[A-Z{UPPER}]"
_TITLE = r"(?:Mr|Mrs|Ms|Dr|Prof|St|Mt|Ft|Gen|Sen|Gov|Lt|Col|Capt|Sgt)\.(?= )"
_REST = r"\w*+(?:&\w++)*+(?:['’](?!s\b)\w++|-\w++)*+"
_WORD = rf"(?:{_TITLE}|{_U}\.(?:{_U}\.)*+|{_U}{_REST})"
_PARTICLE = r"(?:of|the|van|von|der|den|de|del|della|di|da|dos|du|la|le|el|al|bin|ibn|&) "
_JOIN = rf" (?:{_PARTICLE}){{0,2}}(?:(?:al|el)-|[dl]['’])?"
_NAME = rf"{_WORD}(?:{_JOIN}{_WORD}){{0,5}}(?: [0-9]{{1,3}}(?![\w%]|[.,:/-][0-9]))?"
_DATE = r"(?<![0-9][.,])(?:[0-9]{4}s?|[0-9]{1,2}/[0-9]{1,2}/[0-9]{2,4})(?![\w/]|[.,][0-9])"
_ENTITY = re.compile(
    # The lookahead lets the search skip what can begin no entity; the group is the tail of iPhone, eBay, mRNA.
    rf"(?=[A-Z0-9{UPPER}])(?:(?<!\w)(?:{_DATE}|[0-9]{{0,2}}{_NAME})|(?:(?<=\b[a-z])|(?<=\b[a-z][a-z]))({_U}\w+))"
)

_YEAR = re.compile(_DATE)

SCANNED = 8000  # characters of a chunk that are searched for entities


@lru_cache(maxsize=2048)
def extract(text: str, limit_characters: int) -> tuple[str, ...]:
    """Return the distinct entities of the first `limit_characters` of a text, in order of first appearance: names (runs
    of up to six capitalised words, with particles, initials and a trailing number), acronyms, mixed-case words,
    four-digit years and decades, and numeric dates. Leading function words and honorifics, and possessive endings, are
    taken off. A common word at the start of a sentence counts only if the text has it capitalised within one, too."""
    text = text[:limit_characters]
    found: dict[str, bool] = {}
    for match in _ENTITY.finditer(text):
        raw = match.group()
        if match.lastindex:
            if len(raw) <= _LONGEST:
                start = match.start()
                word = start > 1 and text[start - 2].isalpha()
                found[(text[start - 2 : start].lstrip() if word else text[start - 1]) + raw] = True
            continue
        for part in _parts(raw) if ". " in raw else (raw,):
            name, common = _name(part)
            if common and part == raw:
                before = text[max(0, match.start() - 4) : match.start()].rstrip(" \"'“‘([")
                if not before or before[-1] in _SENTENCE_BREAKS:
                    found.setdefault(name, False)
                    continue
            found[name] = True
    return tuple([name for name, certain in found.items() if certain and name])


def _parts(raw: str) -> list[str]:
    """Cut a match where an abbreviation turns out to have ended a sentence, because a function word follows."""
    parts: list[list[str]] = [[]]
    for word in raw.split(" "):
        if parts[-1] and parts[-1][-1].endswith(".") and word[0].isupper() and word.lower() in FUNCTION_WORDS:
            parts.append([])
        parts[-1].append(word)
    return [" ".join(part) for part in parts]


@lru_cache(maxsize=4096)
def _name(raw: str) -> tuple[str, bool]:
    head = raw.partition(" ")[0]
    lowered = head.lower()
    if head.isalpha() and len(head) > 1 and lowered not in _OPENINGS and head.strip("IVX") and raw[-1] != ".":
        # Most matches are whole names as they stand.
        return (raw, len(head) == len(raw) and lowered in _COMMON) if len(raw) <= _LONGEST else ("", False)
    if raw[0].isdigit() and _YEAR.fullmatch(raw):
        return raw, False
    words = raw.split(" ")
    first = 0
    while first < len(words) and _leads(words[first]):
        first += 1
    words = words[first:]
    if not words or len(raw) > _LONGEST or (len(words) == 1 and (len(words[0]) < 2 or _is_initial(words[0]))):
        return "", False
    rest = "".join(words[words[0].lower().rstrip(".") in _CALENDAR :])
    if not rest or rest.isdigit():
        return "", False
    if _is_initial(words[-1]):
        words[-1] = words[-1][:-1]
    return " ".join(words), first == 0 and words[0].lower() in _COMMON and len(words) == 1


def _leads(word: str) -> bool:
    """Return whether a word cannot start a name: a function word, a contraction, or the Roman numeral of a part."""
    lowered = word.lower()
    if lowered in FUNCTION_WORDS:
        return word not in _ACRONYMS
    if "'" in word or "’" in word:
        stem, _, ending = lowered.replace("’", "'").partition("'")
        return ending in _CONTRACTIONS and (ending == "t" or stem in FUNCTION_WORDS)
    return 1 < len(word) < 6 and not word.strip("IVX")


def _is_initial(word: str) -> bool:
    return len(word) == 2 and word[1] == "."


class Bridge(Record, frozen=True):
    """An entity in two or more units. `unit_ids` may be cut; `total` counts them all."""

    entity: str
    unit_ids: tuple[UnitId, ...]
    total: int


class EvidenceGraph(Forkable):
    """The entities and units of an episode, linked both ways, as plain data that only `add` writes. Entities that
    differ only in case, in the dots of an acronym or in a possessive ending are one; the form seen first is shown."""

    names: dict[str, str] = {}  # key of an entity -> the form seen first
    units: dict[str, tuple[UnitId, ...]] = {}  # key of an entity -> the units that mention it, in order of addition
    entities: dict[UnitId, tuple[str, ...]] = {}  # unit -> the keys of its entities, in order of addition
    levels: dict[int, dict[str, None]] = {}  # number of units, from 2 -> the keys of the entities in that many units
    singletons: int = 0  # number of entities in exactly one unit: possible next hops

    def add(self, unit_id: UnitId, entities: Iterable[str]) -> None:
        """Record that a unit mentions some entities. May be called again for more text of the same unit."""
        keys = dict.fromkeys(self.entities.get(unit_id, ()))
        for name in entities:
            key = entity_key(name)
            if not key or key in keys:
                continue
            keys[key] = None
            before = self.units.get(key, ())
            self.units[key] = (*before, unit_id)
            if before:
                self.levels.get(len(before), {}).pop(key, None)
                self.levels.setdefault(len(before) + 1, {})[key] = None
            else:
                self.names[key] = name
            self.singletons += (not before) - (len(before) == 1)
        self.entities[unit_id] = tuple(keys)

    def bridges(self, limit: int, documents: int | None = None) -> list[Bridge]:
        """Return the entities in two units or more, in most units first, then by name, each with its first units."""
        keys: list[str] = []
        for level in sorted(self.levels, reverse=True):
            if len(keys) >= limit:
                break
            keys += nsmallest(limit - len(keys), self.levels[level], key=self.names.__getitem__)
        return [Bridge(self.names[key], self.units[key][:documents], len(self.units[key])) for key in keys]

    def fork(self) -> Self:
        """Return an independent copy, as every `Forkable` does; the levels are dictionaries of dictionaries."""
        forked = super().fork()
        forked.levels = {count: keys.copy() for count, keys in self.levels.items()}
        return forked

    def entities_of(self, unit_id: UnitId) -> tuple[str, ...]:
        return tuple(self.names[key] for key in self.entities.get(unit_id, ()))

    def units_of(self, entity: str) -> tuple[UnitId, ...]:
        return self.units.get(entity_key(entity), ())


def entity_key(name: str) -> str:
    """Return what all forms of an entity share: case, dots of acronyms and possessive endings are folded."""
    key = name.casefold()
    if "." in key or "'" in key or "’" in key:
        key = key.replace(".", "").replace("’", "'").strip().removesuffix("'s").removesuffix("'")
    return key


_HANDLE = re.compile(r"\bE[1-9][0-9]{0,5}\b")
_QUESTION = re.compile(r"\bQ\b")
_EITHER = re.compile(rf"{_HANDLE.pattern}|{_QUESTION.pattern}")
_HANDLES = re.compile(rf"(?:(?:{_EITHER.pattern})[ ,;]*)+")
QUESTION = "Q"  # the handle of the question


class EntityHandles(Forkable):
    """The entities shown in an episode, in order of appearance (E1 is the first); forms of a name are one."""

    names: list[str] = []
    numbers: dict[str, int] = {}  # key of an entity -> the number in its handle, from 1

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

    def mark(self, text: str, characters: int) -> tuple[str, dict[str, str]]:
        """Return a text with ` (E3)` behind the first mention of each entity with a handle, and their names."""
        if not self.numbers:
            return text, {}
        parts: list[str] = []
        shown: dict[str, str] = {}
        done = 0
        for end, name in mentions(text, characters):
            number = self.numbers.get(entity_key(name))
            if number is not None and (handle := f"E{number}") not in shown:
                shown[handle] = name
                parts.append(f"{text[done:end]} ({handle})")
                done = end
        return "".join([*parts, text[done:]]), shown

    def spell(self, query: str, question: str = "") -> SpelledQuery:
        """Replace handles in a query with names, and `Q` in a query of handles alone with the question, if given."""
        used = dict.fromkeys(_HANDLE.findall(query))
        resolved = {handle: self.names[int(handle[1:]) - 1] for handle in used if int(handle[1:]) <= len(self.names)}
        if question and _HANDLES.fullmatch(query) and _QUESTION.search(query):
            resolved[QUESTION] = question
        text = _EITHER.sub(lambda found: resolved.get(found.group(), found.group()), query)
        unknown = tuple(handle for handle in used if handle not in resolved)
        return SpelledQuery(text, resolved, unknown, not _HANDLE.sub("", query).strip(" ,;") and not resolved)


class SpelledQuery(NamedTuple):
    """A query in words, the names behind its handles, what only looked like one, and whether nothing else was in it."""

    text: str
    resolved: dict[str, str]
    unknown: tuple[str, ...]
    empty: bool


def mentions(text: str, characters: int) -> list[tuple[int, str]]:
    """Return the first mention of each entity (no number or part of another) in text order: end and name."""
    names = [name for name in extract(text, characters) if not name.rstrip("s").replace("/", "").isdecimal()]
    taken: list[tuple[int, int]] = []
    for name in sorted(names, key=len, reverse=True):
        for start, end in _places(name, text):
            if not any(start < taken_end and taken_start < end for taken_start, taken_end in taken):
                taken.append((start, end))
                break
    return [(end, text[start:end]) for start, end in sorted(taken)]


def in_handles(query: str, entities: Mapping[str, str]) -> str:
    """Replace names in a query with their handles (`entities`: handle -> name), the longest names first."""
    for handle, name in sorted(entities.items(), key=lambda entity: -len(entity[1])):
        query = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", handle, query)
    return query


def _places(name: str, text: str) -> Iterator[tuple[int, int]]:
    start = text.find(name)
    while start >= 0:
        end = start + len(name)
        if not any(beside.isalnum() or beside == "_" for beside in (text[start - 1 : start], text[end : end + 1])):
            yield start, end
        start = text.find(name, start + 1)
