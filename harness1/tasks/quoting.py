"""Sentences that can be quoted in a question, with one of their names or figures left out."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from importlib import resources

import msgspec

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
    r"(?![\w/\])–—′°:-]|[.,]\d)"
)
_LEANS = re.compile(rf"(?:{alternatives('openings')})\b")
_INNER = re.compile(rf"\b(?:{alternatives('pointers')})\b")
_COUNTED = re.compile(rf"(?:{alternatives('months')}|{alternatives('labels')}) $")
_CUT = re.compile(r"(?<=[a-z”\"’] )(?=[A-Z][a-z]+ [a-z])")
"""Where a sentence may begin in a text that lost its full stops."""


def stands_alone(sentence: str) -> bool:
    """Return whether a sentence can be quoted without its neighbours: whole, of middle length, and without words that
    point to them."""
    if not SHORTEST <= len(sentence) <= LONGEST or not sentence[0].isupper() or sentence[-1] not in ".!":
        return False
    plain = sum(map(str.isalpha, sentence)) + sentence.count(" ")
    return plain > 0.85 * len(sentence) and not leans(sentence) and not _INNER.search(sentence)


def leans(sentence: str) -> bool:
    """Return whether a sentence begins with a word that points to the one before."""
    return _LEANS.match(sentence) is not None


def quotable(graph: CorpusGraph, rng: random.Random) -> Iterator[tuple[int, str, int]]:
    """Yield sentences that stand alone, with their passage and number: one of each passage in random order, then a
    second of each, up to `ROUNDS`. A sentence that is too long gives a part."""
    order = list(range(len(graph.passages)))
    rng.shuffle(order)
    fit: dict[int, list[tuple[int, str]]] = {}
    for place in order:
        cut = graph.passages[place].sentences
        found = [(number, sentence) for number, sentence in enumerate(cut) if stands_alone(sentence)]
        fit[place] = found or [part for part in _parts(cut) if stands_alone(f"{part[1]}.")]
        rng.shuffle(fit[place])
    for number_of_round in range(ROUNDS):
        for place in order:
            for number, sentence in fit[place][number_of_round : number_of_round + 1]:
                yield place, sentence, number


def _parts(sentences: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield the parts of sentences that are too long to quote, with the sentences' numbers."""
    for number, sentence in enumerate(sentences):
        if len(sentence) > LONGEST:
            yield from ((number, part.strip()) for part in _CUT.split(sentence))


def figures(sentence: str) -> list[str]:
    """Return the figures of a sentence, but for single digits, days of a month and numbers that label something."""
    found = (match for match in _FIGURE.finditer(sentence) if len(match.group()) > 1)
    return [match.group() for match in found if not _COUNTED.search(sentence, 0, match.start())]


def once(sentence: str, part: str) -> bool:
    """Return whether a part stands in a sentence once, outside brackets, and is not a piece of a longer name."""
    before, found, after = sentence.partition(part)
    if not found or part in after or before.count("(") > before.count(")"):
        return False
    words, following = before.split(), after.lstrip(": ")[:1]
    led = before.endswith(" ") and len(words) > 1 and words[-1].lstrip('"“‘(')[:1].isupper()
    longer = led or (after.startswith((" ", ": ")) and (following.isupper() or following.isdigit()))
    opens = not before.strip(" \"“'") and " " not in part
    return not (part[0].isalpha() and (longer or opens)) and not (after[:1].isalnum() or before[-1:].isalnum())
