"""What sentences say of the subject of their document, by patterns of phrases (`relations.toml`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

import msgspec

from harness1.records import Record
from harness1.tasks.corpus_graph import Passage

_WORD = r"[A-ZÀ-ÖØ-ÞŁŠŽĆČĐŚŻİ0-9][\w'’&.-]*"
NAME = rf"(?:{_WORD})(?: (?:(?:of|the|de|da|di|van|von|der|la|le|du|del|y|bin|al|&) ){{0,2}}{_WORD}){{0,5}}"
_PEOPLES = ("ish", "ese", "ican", "nian", "rian", "lian", "dian", "tian", "French", "Dutch", "Greek", "German", "Swiss")
"""Endings of words that name a people, and stand before a name rather than being one."""
OPENING = 3
"""Sentences from the start of a document in which a pronoun is taken to mean its subject."""


class Relation(Record):
    """A kind of statement; `relations.toml` says what its parts mean."""

    name: str
    of: tuple[str, ...]
    kind: str
    pattern: str
    ask: str
    names: tuple[str, ...] = ()
    noun: str = ""
    compare: str = ""


class Statement(Record):
    """What a document says of its subject in one sentence."""

    relation: str
    answer: str
    sentence: int


class _File(msgspec.Struct):
    things: list[str]
    following: list[str]
    relation: list[Relation]


_FILE = msgspec.toml.decode(resources.files(__package__).joinpath("relations.toml").read_bytes(), type=_File)
RELATIONS = {each.name: each for each in _FILE.relation}
_PRONOUN = re.compile(rf"(?:It|He|She|They|The (?:{'|'.join(_FILE.things)}))\b")
_GOES_ON = re.compile(rf"(?=$|[,.;:)(\"'–—]| (?:{'|'.join(_FILE.following)})\b| \()")
"""What may follow a whole name; another word means that the name only begins a longer phrase."""
_PATTERNS = {name: re.compile(each.pattern.replace("NAME", NAME)) for name, each in RELATIONS.items()}


def statements(passage: Passage) -> Iterator[Statement]:
    """Yield what a passage says of its subject: one statement of a relation, and none that is said in two ways."""
    if not passage.subject:
        return
    found: dict[str, Statement] = {}
    doubtful: set[str] = set()
    for place, sentence in enumerate(passage.sentences):
        if not is_about(passage, place):
            continue
        for name, pattern in _PATTERNS.items():
            for match in pattern.finditer(sentence):
                answer = _answer(match, RELATIONS[name])
                if not answer or not _attaches(passage, sentence, match.start(), RELATIONS[name]):
                    continue
                if name in found and found[name].answer != answer:
                    doubtful.add(name)
                found.setdefault(name, Statement(name, answer, place))
    yield from (each for name, each in found.items() if name not in doubtful)


def _answer(match: re.Match[str], relation: Relation) -> str:
    """Return the answer that a pattern found, or "" where the name goes on behind it or is that of a people."""
    group = "answer" if match["answer"] else "other"
    if relation.kind != "name":
        return match[group]
    raw = match[group]
    answer = raw.rstrip(".,'’-").removesuffix("'s").removesuffix("’s")
    after = match.string[match.end(group) - len(raw) + len(raw.rstrip(".,")) :]
    last = answer.rpartition(" ")[2]
    if len(last) < 2 or (last.endswith(_PEOPLES) and " " not in answer) or not _GOES_ON.match(after):
        return ""
    return answer


def is_about(passage: Passage, place: int) -> bool:
    """Return whether a sentence is about the subject of its document: it begins with it or with a pronoun for it."""
    sentence = passage.sentences[place]
    first = passage.subject.split()[0]
    if sentence.startswith((passage.subject, f"The {passage.subject}", f'"{passage.subject}')):
        return True
    if place == 0:
        return sentence[: len(passage.subject) + 40].find(first) >= 0
    return place < OPENING and _PRONOUN.match(sentence) is not None


def _attaches(passage: Passage, sentence: str, start: int, relation: Relation) -> bool:
    """Return whether a phrase speaks of the subject rather than of something named between them."""
    before = sentence[:start]
    if relation.name == "birth":
        is_own = passage.subject.split()[0] in before or before.startswith(("He ", "She "))
        return is_own and len(before) <= len(passage.subject) + 40 and before.count("(") == 0
    if re.search(r"\b(?:who|whose|which|where|when|while|but|after|before|because|and (?:his|her|its|the))\b", before):
        return False
    return len(before) < 160
