"""Drafts of tasks, before other documents that answer are looked for: from what documents say of their subjects (single
facts, chains, comparisons, claims), and from names and figures alone, which any text has."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from harness1.memory.entities import FUNCTION_WORDS, entity_key
from harness1.memory.question import head
from harness1.records import DocId, Record
from harness1.tasks.graph import (
    GAP,
    IDENTIFIER,
    LONGEST,
    RELATIONS,
    SHORTEST,
    YEAR,
    CorpusGraph,
    Relation,
    alternatives,
    figures,
    holds_name,
    is_prose,
    is_whole_name,
    leans,
    points_elsewhere,
    quotable,
    stands_once,
)

SINGLE, BRIDGE, COMPARISON = "single", "bridge", "comparison"
INTERSECTION, CLAIM, ASPECT = "intersection", "claim", "aspect"
DESCRIPTION = "description"  # the form that asks what a sentence describes


class Need(Record):
    """A piece of evidence: a passage, and what others have to hold to serve as well: the names in one sentence, or
    nearly what is quoted."""

    passage: int
    names: tuple[str, ...] = ()
    quoted: str = ""


class Draft(Record):
    """A question over passages, which are given by their places in the graph."""

    kind: str
    form: str  # the way of asking within the kind
    question: str
    answer: str
    needs: tuple[Need, ...]  # the evidence, in the order in which a reader finds it
    links: tuple[str, ...] = ()  # the name by which each piece of evidence leads to the next
    gold: tuple[DocId, ...] = ()  # the passages of the evidence, and others that were found to say the same
    reach: float = 0.0  # the share of the gold that one search for the question finds


SPARE_NAMES = 50  # names of earlier sentences among which a wrong one is chosen
FEW, SOME = 4, 8  # most passages that hold a rare name, and one that is less rare
_NOT_NAMES = re.compile(rf"(?<!\w)\d|-[a-z]{{4,}}\b|\b(?:{alternatives('months')}|{alternatives('labels')})\b")
_CODED = re.compile(r"[A-Za-z]\d|[a-z][A-Z]")
_SHORT = re.compile(rf"(?<={GAP}) ?\([A-Z]\w{{0,9}}\)")  # a short form behind the name itself, which would give it away
_EVENT = re.compile(r"(?:[a-z]ed|born|built|won|began|became|died|made|held) (?:[a-z]+ ){0,2}in $")
_PAST = re.compile(r"\b(?:was|were|had)\b")
_SOMEBODY = re.compile(r"\b(?:he|she|him|his|hers?)\b", re.I)
_LONG_WORD = re.compile(r"[^\W\d_]{4,}")
LEAST_WORDS = 4  # longer words of a description
AROUND = 170  # characters of an excerpt on each side of its name
# A name that goes on into the next sentence, for want of a full stop; one of three words may do so as well:
_RUNS_ON = re.compile(rf" (?:{'|'.join(word.capitalize() for word in sorted(FUNCTION_WORDS))})\b")
_MARKED = re.compile(r"[“”|#*{}<>=@\\]|https?:|…|\bet al\b")
_PAGE = re.compile(r"\bpage \d", re.I)
_RARE_NAME = re.compile(r"[A-ZÀ-Þ][\w'’&.-]*[a-zß-ÿ][\w'’&.-]*(?: (?:[a-z]{1,3} )?[A-ZÀ-Þ0-9][\w'’&.-]*)*")


def gap_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield sentences with a figure or a rare name left out, which is asked for."""
    for place, sentence, every in quotable(graph, rng):
        names = [name for name in every if _is_rare(graph, name, FEW) and _is_own(graph, name)]
        names = [name for name in names if not _NOT_NAMES.search(name) and not _may_open(graph, sentence, name)]
        numbers = figures(sentence)
        subject = graph.passages[place].subject
        options = [(name, "name") for name in names] + [(each, "figure") for each in numbers]
        options = [pair for pair in options if stands_once(sentence, pair[0]) and not holds_name(subject, pair[0])]
        if options and (len(names) + len(numbers) > 1 or len(sentence) >= 3 * SHORTEST):
            answer, form = rng.choice(options)
            question = f"Which {form} fits here? “{sentence.replace(answer, GAP)}”"
            yield Draft(SINGLE, f"gap {form}", question, answer, (Need(place, (answer,), sentence),))


def excerpt_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield the words around a rare name, which is asked for: they need no sentence that can be quoted, as in texts
    without full stops. A second name, or a figure, tells which passage is meant."""
    order = [place for place, passage in enumerate(graph.passages) if passage.text]
    rng.shuffle(order)
    for place in order:
        passage = graph.passages[place]
        names = dict.fromkeys(name for each in passage.names for name in each)
        known = [name for name in names if _is_rare(graph, name, SOME) and _is_own(graph, name)]
        rare = [name for name in known if _is_rare(graph, name, FEW) and (name.count(" ") == 1 or name.isalpha())]
        rare = [name for name in rare if not (holds_name(passage.subject, name) or _NOT_NAMES.search(name))]
        rare = [name for name in rare if not (_RUNS_ON.search(name) or _may_run_on(graph, passage.text, name))]
        asked: list[str] = []
        for answer in rng.sample(rare, len(rare)):
            told = _excerpt(passage.text, answer)
            others = [name for name in known if not (holds_name(name, answer) or holds_name(answer, name))]
            others = [each for each in (*others, *figures(told)) if stands_once(told, each)]
            if others and stands_once(told, answer) and not any(name in told for name in asked):
                asked.append(answer)
                question = f"Which name fits in this excerpt? “… {told.replace(answer, GAP)} …”"
                yield Draft(SINGLE, "excerpt", question, answer, (Need(place, (answer, others[0])),))


def _excerpt(text: str, name: str) -> str:
    before, found, after = text.partition(name)
    left = before.splitlines()[-1][-AROUND:] if before and not before.endswith("\n") else ""
    right = after.splitlines()[0][:AROUND] if after and not after.startswith("\n") else ""
    left = left.partition(" ")[2] if len(left) == AROUND else left
    right = right.rpartition(" ")[0] if len(right) == AROUND else right
    told = f"{left}{found}{right}".strip()
    words = told.split()
    small = sum(word[0].islower() for word in words)
    plain = sum(map(str.isalpha, told)) + told.count(" ")
    is_telling = 2 * small >= len(words) >= 3 * LEAST_WORDS and plain > 0.85 * len(told) and not _MARKED.search(told)
    return told if is_telling else ""


def lead_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield sentences with a rare name left out that leads to further passages, all of which are asked for."""
    for place, sentence, names in quotable(graph, rng):
        for name in names:
            others = [other for other in graph.holders[entity_key(name)] if other != place]
            if not others or not _is_distinct(graph, name, FEW) or not stands_once(sentence, name):
                continue
            if holds_name(graph.passages[place].subject, name) or not _is_told_of(graph, name, others):
                continue
            if _is_told_apart(graph, sentence, names, name):
                question = f"Find each document that mentions the name left out here: “{sentence.replace(name, GAP)}”"
                needs = (Need(place, (name,), sentence), *(Need(other, (name,)) for other in others))
                yield Draft(BRIDGE, "lead", question, name, needs, links=(name,))
                break


def pair_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield pairs of names that only one sentence of the corpus holds together."""
    for place, sentence, every in quotable(graph, rng):
        places = {name: {*graph.holders[entity_key(name)]} for name in every}
        names = [name for name in every if len(places[name]) > 1 and _is_distinct(graph, name, SOME)]
        subject = graph.passages[place].subject
        names = [name for name in names if stands_once(sentence, name) and not holds_name(subject, name)]
        pairs = [(a, b) for a, b in combinations(names, 2) if places[a] & places[b] <= {place} and not holds_name(a, b)]
        if pairs:
            a, b = rng.choice(pairs)
            question = f"Which document mentions both {a} and {b}, and what connects them there?"
            yield Draft(INTERSECTION, "names", question, sentence, (Need(place, (a, b)),))


def aspect_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield names that several passages tell of, each of which is asked for."""
    keys = [key for key, places in graph.holders.items() if 3 <= len(places) <= SOME]
    keys = [key for key in keys if " " in key or IDENTIFIER.fullmatch(key)]
    rng.shuffle(keys)
    for key in keys:
        places = graph.holders[key]
        name = next(name for each in graph.passages[places[0]].names for name in each if entity_key(name) == key)
        if _is_distinct(graph, name, SOME) and _is_told_of(graph, name, places):
            with_article = sum(f"the {name}" in graph.passages[place].text for place in places)
            called = f"the {name}" if 2 * with_article > len(places) else name
            question = f"Which documents mention {called}, and what does each of them say there?"
            yield Draft(ASPECT, "name", question, name, tuple(Need(place, (name,)) for place in places))


def description_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield the first sentences of documents, which tell what the document is about, as descriptions of its subject."""
    order = [place for place, passage in enumerate(graph.passages) if passage.subject and passage.sentences]
    rng.shuffle(order)
    for place in order:
        passage, subject = graph.passages[place], graph.passages[place].subject
        if passage.is_section or _PAGE.search(subject) or len(graph.about[head(subject)]) > 1:
            continue
        opening = passage.sentences[0]
        if len(passage.sentences) > 1 and opening.partition("(")[0].strip() == subject:
            opening = passage.sentences[1]  # the first is a heading or a signature
        told = _SHORT.sub("", opening.replace(subject, GAP))
        lowered, own = told.lower(), subject.rpartition(".")[2] if IDENTIFIER.fullmatch(subject) else subject
        is_given_away = any(word in lowered for word in re.findall(r"[^\W_]{4,}", own.lower()))
        is_piece = told[0].islower() or told[-1] not in ".!" or leans(told) or points_elsewhere(told)
        if is_piece or is_given_away or len(set(_LONG_WORD.findall(lowered))) < LEAST_WORDS:
            continue
        if SHORTEST * 2 // 3 <= len(opening) <= LONGEST and is_prose(f"This is {told.replace(GAP, 'it')}"):
            question = f"What is described like this? “{told}”"
            yield Draft(SINGLE, DESCRIPTION, question, subject, (Need(place, quoted=opening),))


def change_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield sentences as claims, half of them with a figure changed, or a name into one that stood behind the same
    word."""
    earlier: dict[tuple[str, int, tuple[str, ...]], list[str]] = defaultdict(list)
    for place, sentence, every in quotable(graph, rng):
        if IDENTIFIER.fullmatch(graph.passages[place].subject) or _SOMEBODY.search(sentence):
            continue  # what code does is told as an order; what somebody did is true of some and false of others
        # A sentence is false with another figure, but a year may only say what is spoken of.
        numbers = [each for each in figures(sentence) if stands_once(sentence, each)]
        is_event = {each: not YEAR.fullmatch(each) or _EVENT.search(sentence.partition(each)[0]) for each in numbers}
        numbers = [each for each in numbers if is_event[each]]
        names = [name for name in every if _is_distinct(graph, name, SOME) and not _may_open(graph, sentence, name)]
        slots = {name: _slot(graph, sentence, name) for name in names if stands_once(sentence, name)}
        if (not numbers and not slots) or _is_about_nothing(graph, sentence, every):
            continue
        refuted, told = rng.random() < 0.5, sentence
        if refuted and numbers:
            chosen = rng.choice([each for each in numbers if not YEAR.fullmatch(each)] or numbers)
            # The last digit of a year is changed, the first of other figures.
            at = 3 if YEAR.fullmatch(chosen) else next(at for at, letter in enumerate(chosen) if letter.isdigit())
            digit = rng.choice([digit for digit in "123456789" if digit != chosen[at]])
            told = sentence.replace(chosen, chosen[:at] + digit + chosen[at + 1 :])
        elif refuted:
            pairs = [(name, other) for name, slot in slots.items() for other in earlier[slot][-SPARE_NAMES:]]
            pairs = [(name, other) for name, other in pairs if other not in sentence and slots[name][0]]
            told = sentence.replace(*rng.choice(pairs)) if pairs else sentence
        for name, slot in slots.items():
            earlier[slot].append(name)
        if told != sentence or not refuted:
            form, verdict = "figure" if numbers else "name", "refuted" if refuted else "supported"
            yield Draft(CLAIM, form, f"Is this true? {told}", verdict, (Need(place, quoted=sentence),))


def _is_told_apart(graph: CorpusGraph, sentence: str, names: Sequence[str], name: str) -> bool:
    """Return whether a sentence without one name still tells what it is about: a short one by a name or a figure."""
    others = (other for other in names if not (holds_name(name, other) or holds_name(other, name)))
    has_other = any(_is_rare(graph, other, SOME) and _is_own(graph, other) for other in others)
    return len(sentence) >= 2 * SHORTEST or has_other or bool(figures(sentence))


def _is_about_nothing(graph: CorpusGraph, sentence: str, names: Sequence[str]) -> bool:
    # It names nothing, or only behind what was done, as the methods of a study do: it could be about anything.
    opening = sentence.split(" ", 1)[0]  # it has a capital whatever it is
    past = _PAST.search(sentence)
    told = sentence[: past.start()] if past else sentence
    most = SOME if past else len(graph.passages)
    return not any(name in told and name != opening and _is_rare(graph, name, most) for name in names)


def _slot(graph: CorpusGraph, sentence: str, name: str) -> tuple[str, int, tuple[str, ...]]:
    # The word before a name, its number of words, and its sort: those that the corpus also writes small, *University*.
    before = sentence.partition(name)[0].split()
    last = before[-1] if before and before[-1].isalpha() and before[-1].islower() else ""
    return last, name.count(" "), tuple(word.lower() for word in name.split() if word.lower() in graph.small)


def _is_distinct(graph: CorpusGraph, name: str, most: int) -> bool:
    """Return whether a rare name hardly names two things: by two words, or digits or capitals in it."""
    is_code = IDENTIFIER.fullmatch(name) is not None or (_CODED.search(name) is not None and "-" not in name)
    is_one = is_code or (" " in name and _is_own(graph, name))
    return is_one and _is_rare(graph, name, most) and not _NOT_NAMES.search(name)


def _may_open(graph: CorpusGraph, sentence: str, name: str) -> bool:
    """Return whether a name may begin with a word that has its capital only from the sentence: *Loss of DICER*."""
    return sentence.startswith(name) and name.split(" ", 1)[0].lower() in graph.small


def _may_run_on(graph: CorpusGraph, text: str, name: str) -> bool:
    # Words of two sentences, *Monday Boom*: it is written once, and begins or ends with a word that needs no capital.
    ends = {word.lower() for word in (name.split()[0], name.split()[-1])}
    is_once = text.count(name) == 1 and len(graph.holders[entity_key(name)]) == 1
    return " " in name and is_once and any(word in graph.small or len(word) < len("The") for word in ends)


def _is_own(graph: CorpusGraph, name: str) -> bool:
    return any(word.lower() not in graph.small for word in name.split() if word[0].isupper())


def _is_rare(graph: CorpusGraph, name: str, most: int) -> bool:
    written = _RARE_NAME.fullmatch(name) or IDENTIFIER.fullmatch(name)
    return len(graph.holders[entity_key(name)]) <= most and len(name) > 3 and written is not None


def _is_told_of(graph: CorpusGraph, name: str, places: Sequence[int]) -> bool:
    # Each passage says something else of it in a whole sentence: titles of menus and tables are repeated, or alone.
    saying = [next((each for each in graph.passages[place].sentences if name in each), "") for place in places]
    within = [each for each in saying if not each.startswith(name) and len(each) > len(name) + SHORTEST * 2 // 3]
    if len(set(saying)) < len(saying) or 2 * len(within) <= len(saying):
        return False
    return all(is_prose(each) and is_whole_name(*each.split(name, 1)) for each in saying)


FAR = 3  # least years between two that are compared


def single_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield a question for each statement, in random order."""
    for place, relation, answer in _list_statements(graph, rng):
        question = RELATIONS[relation].ask.format(x=graph.passages[place].subject)
        yield Draft(SINGLE, relation, question, answer, (_need(graph, place, answer),))


def chain_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield questions about a passage whose subject is named only by what one or two other passages say of theirs."""
    targets = [place for place in graph.leading if place in graph.said]
    rng.shuffle(targets)
    for target in targets:
        chain, relations = [target], [RELATIONS[rng.choice(sorted(graph.said[target]))]]
        longest = rng.choice((2, 3))
        while len(chain) < longest:
            leads = [lead for lead in graph.leading.get(chain[0], ()) if lead[0] not in chain]
            leads = [lead for lead in leads if {*RELATIONS[lead[1]].names} & {*relations[0].of}]
            if not leads:
                break
            source, relation = rng.choice(leads)
            chain, relations = [source, *chain], [RELATIONS[relation], *relations]
        answer = graph.said[target][relations[-1].name]
        if len(chain) < 2 or _is_said_before(graph, chain, answer):
            continue
        described, *links = (graph.passages[place].subject for place in chain)
        for each in relations[:-1]:
            described = each.noun.format(x=described)
        needs = tuple(_need(graph, place, name) for place, name in zip(chain, (*links, answer), strict=True))
        form, question = "-".join(each.name for each in relations), relations[-1].ask.format(x=described)
        yield Draft(BRIDGE, form, question, answer, needs, tuple(links))


def quote_chain_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield questions about a passage whose subject is a gap in a sentence of another passage."""
    for place, sentence, names in quotable(graph, rng):
        for name in names:
            target = graph.find_titled(name)
            if target is None or target == place or target not in graph.said or not stands_once(sentence, name):
                continue
            if not _is_told_apart(graph, sentence, names, name):
                continue
            relation, answer = rng.choice(list(graph.said[target].items()))
            if not _is_said_before(graph, [place, target], answer):
                asked = RELATIONS[relation].ask.format(x=GAP)
                question = f"{asked} {GAP} is the name left out here: “{sentence.replace(name, GAP)}”"
                needs = (Need(place, (name,), sentence), _need(graph, target, answer))
                yield Draft(BRIDGE, f"gap-{relation}", question, answer, needs, (name,))
                break


def comparison_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield questions which of two subjects was first."""
    pairs: list[tuple[Relation, int, int]] = []
    for relation in RELATIONS.values():
        if relation.compare:
            places = list(graph.saying[relation.name])
            rng.shuffle(places)
            pairs += [(relation, a, b) for a, b in zip(places[::2], places[1::2], strict=False)]
    rng.shuffle(pairs)
    for relation, a, b in pairs:
        years = [graph.said[place][relation.name] for place in (a, b)]
        if abs(int(years[0]) - int(years[1])) >= FAR:
            subjects = [graph.passages[place].subject for place in (a, b)]
            needs = (_need(graph, a, years[0]), _need(graph, b, years[1]))
            first = subjects[int(years[0]) > int(years[1])]
            yield Draft(COMPARISON, relation.name, relation.compare.format(a=subjects[0], b=subjects[1]), first, needs)


def claim_drafts(graph: CorpusGraph, rng: random.Random) -> Iterator[Draft]:
    """Yield answers to verify: half of them as the document says, half with what another document says of its own."""
    for place, relation, answer in _list_statements(graph, rng):
        others = [graph.said[other][relation] for other in graph.saying[relation][:100]]
        others = [other for other in others if not {*answer.split()} & {*other.split()}]
        if "place" in RELATIONS[relation].names:
            others = []  # places lie in places: another answer may hold, too
        refuted = bool(others) and rng.random() < 0.5
        question = RELATIONS[relation].ask.format(x=graph.passages[place].subject)
        question += f" Check this answer: {rng.choice(others) if refuted else answer}."
        verdict = "refuted" if refuted else "supported"
        yield Draft(CLAIM, relation, question, verdict, (_need(graph, place, answer),))


def _list_statements(graph: CorpusGraph, rng: random.Random) -> list[tuple[int, str, str]]:
    found = [(place, relation, answer) for place, said in graph.said.items() for relation, answer in said.items()]
    rng.shuffle(found)
    return found


def _is_said_before(graph: CorpusGraph, chain: Sequence[int], answer: str) -> bool:
    return any(answer in graph.passages[place].text for place in chain[:-1])


def _need(graph: CorpusGraph, place: int, answer: str) -> Need:
    return Need(place, (graph.passages[place].subject, answer))
