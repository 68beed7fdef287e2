"""What tasks are made from: the passages of a corpus, the names that they hold and are about, what their sentences say
of their subjects (`relations.toml`), and which sentences can be quoted alone (`quoting.toml`)."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from importlib import resources

import msgspec

from harness1.memory import sentences
from harness1.memory.entities import FUNCTION_WORDS, entity_key, extract
from harness1.memory.question import head, normalise_name
from harness1.records import DocId, Record
from harness1.retrieval.corpus import Document

WIDE = 55  # characters of a line that may have been broken because the next word had no room
_ENDS = (".", "!", "?", ":", ";", ".)", ".”", '."')
_TABLE = re.compile(r"\||\t| {3,}|\.{4,}|`{3}")
_APART = re.compile(rf"[-*•·#>=~+]|\d+[.)] |\(?[a-z]\) |\.\. |.*(?:{_TABLE.pattern})")
"""A line of a list, a table or code, or a heading."""


def join_lines(text: str) -> str:
    """Return a text with the lines of each paragraph joined: sentences would end at their borders."""
    paragraphs, bare = [""], ""
    for line in map(str.strip, text.splitlines()):
        is_apart = not bare or not line or bare.endswith(_ENDS) or _APART.match(line) or _TABLE.search(bare)
        if paragraphs[-1] and not is_apart and (line[0].islower() or bare.endswith(",") or len(bare) >= WIDE):
            paragraphs[-1] += f" {line}"
        elif paragraphs[-1]:
            paragraphs.append(line)
        else:
            paragraphs[-1] = line
        bare = line
    return "\n".join(paragraphs)


READ = 4000  # characters of a document that tasks are made from; the rest is read only for other documents that answer
NUMBER = re.compile(r"[\d/s]+")
IDENTIFIER = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w.])|(?<![\w.])[A-Za-z]\w*_\w+(?![\w.])")
"""Names of things in code, which have no capitals."""
_SMALL = re.compile(r"(?<![\w-])[a-z]{3,}(?![\w-])")
_LETTERS = re.compile(r"[^\W\d_]{3}")
_BRACKETS = re.compile(r"\s*[(\[].*?[)\]]")
_SECTION = re.compile(r"\s+[-–—|]\s+")


@dataclass(frozen=True)
class Passage:
    """A document as tasks see it."""

    doc_id: DocId
    subject: str  # what its title names, without brackets and sections; "" where the title names nothing
    sentences: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]  # the names in each sentence, in order; no years and dates
    text: str  # the whole text; the lines of a paragraph are joined
    is_section: bool = False  # True if its title names a section of something larger


class CorpusGraph:
    """The passages of a corpus, and for each name (`entity_key`) the places of those that hold it, and of those that
    are about it. The time is linear in the text."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self.passages: list[Passage] = []
        self.holders: dict[str, list[int]] = defaultdict(list)
        self.about: dict[str, list[int]] = defaultdict(list)
        self.small: set[str] = set()  # words that the corpus writes without a capital
        for place, document in enumerate(documents):
            whole = join_lines(document.text)
            text = whole[:READ]
            cut = sentences.split(text)
            self.small.update(_SMALL.findall(text))
            known = {name for name in extract(text, READ) if not NUMBER.fullmatch(name)}
            code = (dict.fromkeys(IDENTIFIER.findall(each)) for each in cut)
            named = ([name for name in extract(each, READ) if name in known] for each in cut)
            names = tuple((*own, *more) for own, more in zip(named, code, strict=True))
            is_section = _SECTION.search(document.title) is not None
            passage = Passage(document.doc_id, subject_of(document.title), cut, names, whole, is_section)
            self.passages.append(passage)
            for key in dict.fromkeys(entity_key(name) for each in names for name in each):
                self.holders[key].append(place)
            if passage.subject:
                self.about[head(document.title)].append(place)
        self.quotable = [_find_quotable(passage.sentences) for passage in self.passages]  # by passage, with numbers
        self.said: dict[int, dict[str, str]] = {}  # what a passage states, if it alone is about its subject
        self.saying: dict[str, list[int]] = defaultdict(list)  # the passages that state a relation
        self.leading: dict[int, list[tuple[int, str]]] = defaultdict(list)  # relations of others whose answer it is
        for place, passage in enumerate(self.passages):
            if len(self.about.get(head(passage.subject), ())) == 1 and not passage.subject.startswith("List of"):
                for relation, answer in find_statements(passage).items():
                    self.said.setdefault(place, {})[relation] = answer
                    self.saying[relation].append(place)
                    target = self.find_titled(answer) if RELATIONS[relation].noun else None
                    if target is not None and target != place:
                        self.leading[target].append((place, relation))

    def find_titled(self, name: str) -> int | None:
        """Return the only passage that is about a name, or None."""
        found = self.about.get(head(name), ())
        return found[0] if len(found) == 1 else None


def subject_of(title: str) -> str:
    """Return the name in a title, or "" if it is a sentence, a file or a page rather than a name."""
    bare = _SECTION.split(_BRACKETS.sub("", unescape(title)).strip())[0].strip()
    is_name = 0 < len(bare.split()) <= 8 and not bare.endswith((".", "?", "!", ":")) and bare[0].isalnum()
    return bare if is_name and _LETTERS.search(bare) else ""  # no search finds "No. 2"


_NAME_WORD = r"[A-ZÀ-ÖØ-ÞŁŠŽĆČĐŚŻİ0-9][\w'’&.-]*"
NAME = rf"(?:{_NAME_WORD})(?: (?:(?:of|the|de|da|di|van|von|der|la|le|du|del|y|bin|al|&) ){{0,2}}{_NAME_WORD}){{0,5}}"
_PEOPLES = ("ish", "ese", "ican", "nian", "rian", "lian", "dian", "tian", "French", "Dutch", "Greek", "German", "Swiss")
"""Endings of words that name a people, and stand before a name rather than being one."""
OPENING = 3  # sentences from the start of a document in which a pronoun is taken to mean its subject


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


class _File(msgspec.Struct):
    things: list[str]
    following: list[str]
    relation: list[Relation]


_FILE = msgspec.toml.decode(resources.files(__package__).joinpath("relations.toml").read_bytes(), type=_File)
RELATIONS = {each.name: each for each in _FILE.relation}
_FOR_SUBJECT = re.compile(rf"(?:It|He|She|They|The (?:{'|'.join(_FILE.things)}))\b")
_GOES_ON = re.compile(rf"(?=$|[,.;:)(\"'–—]| (?:{'|'.join(_FILE.following)})\b| \()")
"""What may follow a whole name; another word means that the name only begins a longer phrase."""
_ASIDE = re.compile(r"\b(?:who|whose|which|where|when|while|but|after|before|because|and (?:his|her|its|the))\b")
_PATTERNS = {name: re.compile(each.pattern.replace("NAME", NAME)) for name, each in RELATIONS.items()}


def find_statements(passage: Passage) -> dict[str, str]:
    """Return what a passage says of its subject: the answer of each relation, but none that it gives in two ways."""
    found: dict[str, str] = {}
    doubtful: set[str] = set()
    for place, sentence in enumerate(passage.sentences if passage.subject else ()):
        for name, pattern in _PATTERNS.items() if _is_about(passage, place) else ():
            for match in pattern.finditer(sentence):
                answer = _answer(match, RELATIONS[name])
                is_said = answer and _attaches(passage, sentence[: match.start()], name)
                if is_said and found.setdefault(name, answer) != answer:
                    doubtful.add(name)
    return {name: answer for name, answer in found.items() if name not in doubtful}


def _answer(match: re.Match[str], relation: Relation) -> str:
    group = "answer" if match["answer"] else "other"
    raw = match[group]
    if relation.kind != "name":
        return raw
    answer = raw.rstrip(".,'’-").removesuffix("'s").removesuffix("’s")
    is_people = answer.endswith(_PEOPLES) and " " not in answer
    is_whole = _GOES_ON.match(match.string, match.end(group) - len(raw) + len(raw.rstrip(".,")))
    return answer if len(answer.rpartition(" ")[2]) >= 2 and not is_people and is_whole else ""


def _is_about(passage: Passage, place: int) -> bool:
    sentence = passage.sentences[place]
    if sentence.startswith((passage.subject, f"The {passage.subject}", f'"{passage.subject}')):
        return True
    if place == 0:
        return passage.subject.split()[0] in sentence[: len(passage.subject) + 40]
    return place < OPENING and _FOR_SUBJECT.match(sentence) is not None


def _attaches(passage: Passage, before: str, relation: str) -> bool:
    if relation == "birth":
        is_own = passage.subject.split()[0] in before or before.startswith(("He ", "She "))
        return is_own and len(before) <= len(passage.subject) + 40 and "(" not in before
    return len(before) < 160 and not _ASIDE.search(before)


GAP = "____"
SHORTEST, LONGEST = 45, 260  # characters of a sentence that is quoted
ROUNDS = 4  # most sentences that are quoted of a passage
WORDS = msgspec.toml.decode(
    resources.files(__package__).joinpath("quoting.toml").read_bytes(), type=dict[str, list[str]]
)


def alternatives(name: str) -> str:
    """Return a list of `quoting.toml` as the alternatives of a regular expression."""
    return "|".join(WORDS[name])


_FIGURE = re.compile(
    r"(?<![\w.,/\[(–—:$-])(?:\$ ?)?\d(?:[\d,]*\d)?(?:\.\d+)?(?: ?%| percent| million| billion)?"
    rf"(?![\w/\])–—′°:-]|[.,]\d| \d| (?:{alternatives('months')})\b)"
)
YEAR = re.compile(r"[12]\d{3}")
_YEARS = re.compile(r"\b[12]\d{3}\b")
_LEANS = re.compile(rf"(?:{alternatives('openings')})\b|[A-Z][\w-]+,|(?:[A-Z]{{4,}} )+[A-Z]")
_INNER = re.compile(rf"\b(?:{alternatives('pointers')})\b")
_UNNAMED = re.compile(
    rf"\b[Tt]he (?:[a-z-]+ )?(?i:{alternatives('unnamed')})(?! (?:{alternatives('going_on')})\b| [A-Z“\"])(?![\w-])"
)
_AGAIN = re.compile(rf"(?:The|A|An) (?:[\w'’-]+ ){{1,2}}(?:{alternatives('verbs')}|[a-z]+ed|also|then)\b")
"""A sentence about something that the one before has named."""
_VERB = re.compile(rf"\b(?:{alternatives('verbs')}|[a-z]{{2,}}ed)\b")
_PRONOUN = re.compile(r"\b(?:he|she|his|her|him|hers)\b")
_MARKS = re.compile(r"[|#*•©»«…→<>={}~^_\\\t]|https?:|www\.|\.{2,}|--|\s[-–—:]\s.*\s[-–—:]\s|\?")
_CITED = re.compile(
    r"\s*\[\d+(?:\s*[,–-]\s*\d+)*\](?=\s*[.,;]|\s|$)|\s+\d{1,3}(?:\s*[,–-]\s*\d{1,3})*(?=\s+\.)"
    r"|\s+\((?:[A-Z][\w-]+ et al[^()]*)\)"
)
_SPACED = re.compile(r"\s+([.,;])(?=\s|$)")
_TWICE = re.compile(r"\b(\w+ \w+) \1\b")
_COUNTED = re.compile(
    rf"(?:{alternatives('months')}|{alternatives('labels')}|[a-z]ection|[Cc]ode|[\w-]*\d[A-Z]*) $"
    rf"|(?:{alternatives('months')}) \d{{1,2}},? $|\d (?:{alternatives('months')}),? $"
)
_CUT = re.compile(
    r"(?<=[a-z0-9”\"’)%] )(?=(?:The|An|In|On|At|For|By|With|From|It|He|She|They|This|That|But|And|While|When|After"
    r"|If|You|We|There|What|Meanwhile|However|As|So|His|Her|Their|Its|These|Those) [a-z0-9])"
)
"""Where a sentence begins in a text that lost its full stops: at a word that has a capital only there."""
_MERGED = re.compile(
    rf"(?<![\w'’-])(?!(?:{alternatives('conjunctions')}) )[a-z][a-z'’-]* (?:[A-Z][\w'’.-]+ ){{1,3}}"
    rf"(?:{alternatives('verbs')}|also|[a-z]+ed)\b"
)
"""Two sentences without a full stop between them."""


def stands_alone(sentence: str) -> bool:
    """Return whether a sentence can be quoted alone: whole, in prose, without words that point away."""
    if not SHORTEST <= len(sentence) <= LONGEST or not sentence[0].isupper() or sentence[-1] not in ".!":
        return False
    return is_prose(sentence) and not (
        leans(sentence)
        or _CUT.search(sentence)
        or _INNER.search(sentence)
        or _UNNAMED.search(sentence)
        or _AGAIN.match(sentence)
    )


def is_prose(sentence: str) -> bool:
    """Return whether a text is a sentence that tells something: no heading, menu, code, or piece of a table."""
    words = sentence.split()
    small = sum(word[:1].islower() for word in words)
    plain = sum(map(str.isalpha, sentence)) + sentence.count(" ")
    return (
        plain > 0.85 * len(sentence)
        and 2 * small >= len(words)
        and _VERB.search(sentence) is not None
        and _MARKS.search(sentence) is None
        and _TWICE.search(sentence) is None
        and sentence.count('"') % 2 == 0
        and sentence.count("“") == sentence.count("”")
        and sentence.count("(") == sentence.count(")")
    )


def leans(sentence: str) -> bool:
    """Return whether a sentence begins with a word that points to the one before, or has a pronoun before any name."""
    pronoun = _PRONOUN.search(sentence)
    before = sentence[: pronoun.start()].split() if pronoun else ["Somebody"]
    return _LEANS.match(sentence) is not None or not any(
        word[:1].isupper() and word.lower() not in FUNCTION_WORDS for word in before
    )


def quotable(graph: CorpusGraph, rng: random.Random) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield sentences that stand alone, with their passage and their names: one of each passage in random order,
    then a second of each, up to `ROUNDS`."""
    order = list(range(len(graph.passages)))
    rng.shuffle(order)
    fit = {place: rng.sample(graph.quotable[place], len(graph.quotable[place])) for place in order}
    for number_of_round in range(ROUNDS):
        for place in order:
            for number, sentence in fit[place][number_of_round : number_of_round + 1]:
                yield place, sentence, graph.passages[place].names[number]


def _find_quotable(cut: Sequence[str]) -> list[tuple[int, str]]:
    tidy = [(number, _SPACED.sub(r"\1", _CITED.sub("", sentence))) for number, sentence in enumerate(cut)]
    parts = (
        (number, part.strip())
        for number, sentence in enumerate(cut)
        if len(sentence) > LONGEST
        for part in _CUT.split(sentence)
        if not _MERGED.search(part)
    )
    found = [pair for pair in tidy if stands_alone(pair[1])]
    return found or [pair for pair in parts if stands_alone(f"{pair[1]}.")]


def points_elsewhere(sentence: str) -> bool:
    """Return whether a sentence points out of itself: *today*, *this study*, *Table 2*."""
    return _INNER.search(sentence) is not None


def figures(sentence: str) -> list[str]:
    """Return the figures of a sentence but single digits, dates, labels, and years beside their neighbours."""
    found = (match for match in _FIGURE.finditer(sentence) if len(match.group()) > 1)
    kept = [match.group() for match in found if not _COUNTED.search(sentence, 0, match.start())]
    years = {int(each) for each in _YEARS.findall(sentence)}
    return [each for each in kept if not YEAR.fullmatch(each) or not years & {int(each) - 1, int(each) + 1}]


def stands_once(sentence: str, part: str) -> bool:
    """Return whether a part stands in a sentence once, outside brackets, and is not a piece of a longer name."""
    before, found, after = sentence.partition(part)
    if not found or part in after or before.count("(") > before.count(")"):
        return False
    opens = not before.strip(" \"“'") and " " not in part
    return not (part[0].isalpha() and (opens or not is_whole_name(before, after))) and not (
        after[:1].isalnum() or before[-1:].isalnum()
    )


def is_whole_name(before: str, after: str) -> bool:
    """Return whether a name between two texts is not a piece of a longer name."""
    last, following = before.split()[-1:] or [""], after.lstrip(": ")[:1]
    led = before.endswith((" ", "-")) and len(before.split()) > 1 and last[0].lstrip('"“‘(')[:1].isupper()
    led |= before.endswith(" ") and last[0][:1].isdigit() and last[0][-1:].isalpha()
    joined = before.endswith(("-", "’", "'", "/", "&", "& ")) or after.startswith(("-", "/", "'", "’", "&", " &"))
    return not (led or joined or (after.startswith((" ", ": ")) and (following.isupper() or following.isdigit())))


def holds_name(text: str, name: str) -> bool:
    """Return whether a text holds the words of a name."""
    words = normalise_name(name)
    return bool(words) and f" {words} " in f" {normalise_name(text)} "
