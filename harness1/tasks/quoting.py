"""Sentences that can be quoted in a question, with one of their names or figures left out."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from importlib import resources

import msgspec

from harness1.memory.entities import FUNCTION_WORDS
from harness1.tasks.corpus_graph import CorpusGraph

GAP = "____"
SHORTEST, LONGEST = 45, 260
"""Characters of a sentence that is quoted."""
ROUNDS = 4
"""Most sentences that are quoted of a passage."""
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
    """Return whether a sentence can be quoted without its neighbours: whole, of middle length, in prose, and without
    words that point to them."""
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


def quotable(graph: CorpusGraph, rng: random.Random) -> Iterator[tuple[int, str, int]]:
    """Yield sentences that stand alone, with their passage and number: one of each passage in random order, then a
    second of each, up to `ROUNDS`. A sentence that is too long gives a part."""
    order = list(range(len(graph.passages)))
    rng.shuffle(order)
    fit = {place: rng.sample(found := _fit(graph, place), len(found)) for place in order}
    for number_of_round in range(ROUNDS):
        for place in order:
            for number, sentence in fit[place][number_of_round : number_of_round + 1]:
                yield place, sentence, number


def _fit(graph: CorpusGraph, place: int) -> list[tuple[int, str]]:
    """Return the sentences of a passage that stand alone, with their numbers; they are looked for once."""
    if (known := graph.fit.get(place)) is None:
        cut = graph.passages[place].sentences
        whole = [(number, tidied(sentence)) for number, sentence in enumerate(cut)]
        found = [(number, sentence) for number, sentence in whole if stands_alone(sentence)]
        known = found or [part for part in _parts(cut) if stands_alone(f"{part[1]}.")]
        graph.fit[place] = known
    return known


def tidied(sentence: str) -> str:
    """Return a sentence without references to literature."""
    return _SPACED.sub(r"\1", _CITED.sub("", sentence))


def _parts(sentences: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield the parts of sentences that are too long to quote, with the sentences' numbers."""
    for number, sentence in enumerate(sentences):
        if len(sentence) > LONGEST:
            yield from ((number, part.strip()) for part in _CUT.split(sentence) if not _MERGED.search(part))


def is_told_apart(sentence: str, names: Iterable[str]) -> bool:
    """Return whether a sentence with one name left out still tells what it is about: a short one needs another name or
    a figure for that.

    Args:
        names: its other rare names.
    """
    return len(sentence) >= 2 * SHORTEST or any(names) or bool(figures(sentence))


def points_elsewhere(sentence: str) -> bool:
    """Return whether a sentence points out of itself: *today*, *this study*, *Table 2*."""
    return _INNER.search(sentence) is not None


def figures(sentence: str) -> list[str]:
    """Return the figures of a sentence, but for single digits, dates, numbers that label something, and years beside
    their neighbours."""
    found = (match for match in _FIGURE.finditer(sentence) if len(match.group()) > 1)
    kept = [match.group() for match in found if not _COUNTED.search(sentence, 0, match.start())]
    years = {int(each) for each in _YEARS.findall(sentence)}
    return [each for each in kept if not YEAR.fullmatch(each) or not years & {int(each) - 1, int(each) + 1}]


def once(sentence: str, part: str) -> bool:
    """Return whether a part stands in a sentence once, outside brackets, and is not a piece of a longer name."""
    before, found, after = sentence.partition(part)
    if not found or part in after or before.count("(") > before.count(")"):
        return False
    opens = not before.strip(" \"“'") and " " not in part
    return not (part[0].isalpha() and (opens or not whole(before, after))) and not (
        after[:1].isalnum() or before[-1:].isalnum()
    )


def whole(before: str, after: str) -> bool:
    """Return whether a name between two texts is not a piece of a longer name."""
    last, following = before.split()[-1:] or [""], after.lstrip(": ")[:1]
    led = before.endswith((" ", "-")) and len(before.split()) > 1 and last[0].lstrip('"“‘(')[:1].isupper()
    led |= before.endswith(" ") and last[0][:1].isdigit() and last[0][-1:].isalpha()
    joined = before.endswith(("-", "’", "'", "/", "&", "& ")) or after.startswith(("-", "/", "'", "’", "&", " &"))
    return not (led or joined or (after.startswith((" ", ": ")) and (following.isupper() or following.isdigit())))
