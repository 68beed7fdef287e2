"""Drafts from names and figures alone, which any text has: gaps, names that lead on, shared names, and claims."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from harness1.memory.evidence import entity_key
from harness1.memory.question import head, normalised_name
from harness1.tasks.corpus_graph import IDENTIFIER, CorpusGraph
from harness1.tasks.drafts import ASPECT, BRIDGE, CLAIM, INTERSECTION, SINGLE, Draft, Need
from harness1.tasks.quoting import GAP, LONGEST, SHORTEST, alternatives, figures, leans, once, quotable

SPARE_NAMES = 50
"""Names of earlier sentences among which a wrong one is chosen."""
FEW, SOME = 4, 8
"""Most passages that hold a rare name, and one that is less rare."""
_NOT_NAMES = re.compile(rf"\d|\b(?:{alternatives('months')})\b")
_PAGE = re.compile(r"\bpage \d", re.I)
_RARE_NAME = re.compile(r"[A-ZÀ-Þ][\w'’&.-]*[a-zß-ÿ][\w'’&.-]*(?: (?:[a-z]{1,3} )?[A-ZÀ-Þ0-9][\w'’&.-]*)*")


def gap_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield sentences with a figure or a rare name left out, which is asked for."""
    for place, sentence, number in quotable(graph, rng):
        subject = graph.passages[place].subject
        names = [name for name in graph.passages[place].names[number] if _is_rare(graph, name, FEW)]
        numbers = figures(sentence)
        options = [(name, "name") for name in names] + [(each, "figure") for each in numbers]
        options = [(each, form) for each, form in options if once(sentence, each) and not _has(subject, each)]
        if options and len(names) + len(numbers) > 1:
            answer, form = rng.choice(options)
            question = f"Which {form} fits here? “{sentence.replace(answer, GAP)}”"
            needs = (Need(place, quoted=sentence),)
            yield Draft(kind=SINGLE, form=f"gap {form}", question=question, needs=needs, answer=answer)


def lead_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield sentences with a rare name left out that leads to further passages, all of which are asked for."""
    for place, sentence, number in quotable(graph, rng):
        for name in graph.passages[place].names[number]:
            others = [other for other in graph.holders[entity_key(name)] if other != place]
            if not others or not _is_rare(graph, name, FEW) or not once(sentence, name):
                continue
            if _has(graph.passages[place].subject, name) or not _is_told_of(graph, name, others):
                continue
            yield Draft(
                kind=BRIDGE,
                form="lead",
                question=f"Find the name that fits here, and what else is said of it: “{sentence.replace(name, GAP)}”",
                needs=(Need(place, quoted=sentence), *(Need(other, (name,)) for other in others)),
                answer=name,
                links=(name,),
            )
            break


def shared_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield pairs of names that only one sentence of the corpus holds together."""
    for place, sentence, number in quotable(graph, rng):
        subject = graph.passages[place].subject
        names = [
            name
            for name in graph.passages[place].names[number]
            if len(graph.holders[entity_key(name)]) > 1
            and _is_rare(graph, name, SOME)
            and once(sentence, name)
            and not _has(subject, name)
        ]
        pairs = [
            (a, b)
            for a, b in combinations(names, 2)
            if not {*graph.holders[entity_key(a)]} & {*graph.holders[entity_key(b)]} - {place} and not _has(a, b)
        ]
        if pairs:
            a, b = rng.choice(pairs)
            question = f"How are {a} and {b} connected?"
            need = Need(place, (a, b))
            yield Draft(kind=INTERSECTION, form="names", question=question, needs=(need,), answer=sentence)


def aspect_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield names that several passages tell of, each of which is asked for."""
    keys = [key for key, places in graph.holders.items() if 3 <= len(places) <= SOME]
    keys = [key for key in keys if " " in key or IDENTIFIER.fullmatch(key)]
    rng.shuffle(keys)
    for key in keys:
        places = graph.holders[key]
        name = next(name for each in graph.passages[places[0]].names for name in each if entity_key(name) == key)
        if _is_rare(graph, name, SOME) and not _NOT_NAMES.search(name) and _is_told_of(graph, name, places):
            question = f"What do the documents say of {name}? Find each one that names it."
            needs = tuple(Need(place, (name,)) for place in places)
            yield Draft(kind=ASPECT, form="name", question=question, needs=needs, answer=name)


def described_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield the first sentences of documents, which tell what the document is about, as descriptions of its subject."""
    order = [place for place, passage in enumerate(graph.passages) if passage.subject and passage.sentences]
    rng.shuffle(order)
    for place in order:
        passage = graph.passages[place]
        is_whole = not passage.is_section and not _PAGE.search(passage.subject)
        opening = passage.sentences[0]
        if len(passage.sentences) > 1 and opening.partition("(")[0].strip() == passage.subject:
            opening = passage.sentences[1]  # the first is a heading or a signature
        told = opening.replace(passage.subject, GAP)
        if (
            not is_whole
            or not SHORTEST * 2 // 3 <= len(opening) <= LONGEST
            or len(graph.about[head(passage.subject)]) > 1
        ):
            continue
        if told[0].islower() or told[-1] not in ".!" or leans(told) or _shares_words(told, passage.subject):
            continue
        needs = (Need(place, quoted=opening),)
        question = f"What is described like this? “{told}”"
        yield Draft(kind=SINGLE, form="description", question=question, needs=needs, answer=passage.subject)


def changed_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield sentences as claims: half of them as they stand, half with a figure or a rare name changed."""
    earlier: list[str] = []
    for place, sentence, number in quotable(graph, rng):
        numbers = [each for each in figures(sentence) if once(sentence, each)]
        names = [name for name in graph.passages[place].names[number] if _is_rare(graph, name, SOME)]
        names = [name for name in names if once(sentence, name)]
        if not numbers and (not names or not earlier):
            continue
        refuted = rng.random() < 0.5
        told = sentence
        if refuted and numbers:
            chosen = rng.choice(numbers)
            told = sentence.replace(chosen, _other(chosen, rng))
        elif refuted:
            told = sentence.replace(rng.choice(names), rng.choice(earlier[-SPARE_NAMES:]))
        earlier += names
        if told == sentence and refuted:
            continue
        yield Draft(
            kind=CLAIM,
            form="figure" if numbers else "name",
            question=f"Is this true? {told}",
            needs=(Need(place, quoted=sentence),),
            answer="refuted" if refuted else "supported",
        )


def _is_rare(graph: CorpusGraph, name: str, most: int) -> bool:
    """Return whether a name is written as one, and at most `most` passages hold it."""
    written = _RARE_NAME.fullmatch(name) or IDENTIFIER.fullmatch(name)
    return len(graph.holders[entity_key(name)]) <= most and len(name) > 3 and written is not None


def _has(text: str, part: str) -> bool:
    return bool(text) and f" {normalised_name(part)} " in f" {normalised_name(text)} "


def _shares_words(text: str, name: str) -> bool:
    """Return whether a text has a longer word of a name, of a dotted one of its last part, also within a longer one."""
    lowered, own = text.lower(), name.rpartition(".")[2] if IDENTIFIER.fullmatch(name) else name
    return any(word in lowered for word in re.findall(r"[^\W_]{4,}", own.lower()))


def _is_told_of(graph: CorpusGraph, name: str, places: Sequence[int]) -> bool:
    """Return whether each passage says something else of a name, mostly within a sentence: titles of menus, of tables
    and of sections are repeated, or stand alone."""
    saying = [next((each for each in graph.passages[place].sentences if name in each), "") for place in places]
    within = [each for each in saying if not each.startswith(name) and len(each) > len(name) + SHORTEST * 2 // 3]
    return "" not in saying and len(set(saying)) == len(saying) and 2 * len(within) > len(saying)


def _other(figure: str, rng: random.Random) -> str:
    """Return another figure of the same look: the last digit of a year is changed, the first of others."""
    is_year = len(figure) == 4 and figure.isdigit() and figure[0] in "12"
    at = 3 if is_year else next(place for place, letter in enumerate(figure) if letter.isdigit())
    others = [digit for digit in "123456789" if digit != figure[at]]
    return figure[:at] + rng.choice(others) + figure[at + 1 :]
