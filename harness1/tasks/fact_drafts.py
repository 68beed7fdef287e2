"""Drafts from what documents say of their subjects: single facts, chains of them, comparisons and claims."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from harness1.memory.question import head
from harness1.tasks.corpus_graph import CorpusGraph
from harness1.tasks.drafts import BRIDGE, CLAIM, COMPARISON, SINGLE, Draft, Need
from harness1.tasks.name_drafts import other_names
from harness1.tasks.quoting import GAP, is_told_apart, once, quotable
from harness1.tasks.relations import RELATIONS, Relation, Statement, statements

FAR = 3
"""Least years between two that are compared."""
Item = TypeVar("Item")


@dataclass
class Facts:
    """The statements of a corpus, of subjects that a single passage is about."""

    graph: CorpusGraph
    of: dict[int, dict[str, Statement]] = field(default_factory=dict)
    """The statements of a passage, by relation."""
    saying: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The passages with a statement of a relation."""
    leading: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """For a passage, the relations of others whose answer is its subject."""

    def subject(self, place: int) -> str:
        return self.graph.passages[place].subject

    def need(self, place: int, answer: str) -> Need:
        return Need(place, (self.subject(place), answer))


def facts_of(graph: CorpusGraph) -> Facts:
    """Return the facts of a corpus."""
    facts = Facts(graph)
    for place, passage in enumerate(graph.passages):
        if len(graph.about.get(head(passage.subject), ())) != 1 or passage.subject.startswith("List of"):
            continue
        for each in statements(passage):
            facts.of.setdefault(place, {})[each.relation] = each
            facts.saying[each.relation].append(place)
            target = graph.titled(each.answer) if RELATIONS[each.relation].noun else None
            if target is not None and target != place:
                facts.leading[target].append((place, each.relation))
    return facts


def single_drafts(facts: Facts, rng: random.Random) -> Iterator[Draft]:
    """Yield a question for each statement, in random order."""
    for place, said in _said(facts, rng):
        question = RELATIONS[said.relation].ask.format(x=facts.subject(place))
        need = facts.need(place, said.answer)
        yield Draft(kind=SINGLE, form=said.relation, question=question, needs=(need,), answer=said.answer)


def chain_drafts(facts: Facts, rng: random.Random) -> Iterator[Draft]:
    """Yield questions about a passage whose subject is named only by what one or two other passages say of theirs."""
    for target in _shuffled([place for place in facts.leading if place in facts.of], rng):
        chain, relations = [target], [_asked(facts, target, rng)]
        longest = rng.choice((2, 3))
        while len(chain) < longest and (leads := _leads(facts, chain, relations[0])):
            source, relation = rng.choice(leads)
            chain, relations = [source, *chain], [RELATIONS[relation], *relations]
        said = facts.of[target][relations[-1].name]
        if len(chain) < 2 or _is_said_before(facts, chain, said.answer):
            continue
        described = facts.subject(chain[0])
        for relation_ in relations[:-1]:
            described = relation_.noun.format(x=described)
        links = tuple(facts.subject(place) for place in chain[1:])
        yield Draft(
            kind=BRIDGE,
            form="-".join(each.name for each in relations),
            question=relations[-1].ask.format(x=described),
            needs=tuple(facts.need(place, name) for place, name in zip(chain, (*links, said.answer), strict=True)),
            answer=said.answer,
            links=links,
        )


def quoted_chain_drafts(facts: Facts, rng: random.Random) -> Iterator[Draft]:
    """Yield questions about a passage whose subject is a gap in a sentence of another passage."""
    for place, sentence, number in quotable(facts.graph, rng):
        for name in facts.graph.passages[place].names[number]:
            target = facts.graph.titled(name)
            if target is None or target == place or target not in facts.of or not once(sentence, name):
                continue
            if not is_told_apart(sentence, other_names(facts.graph, place, number, name)):
                continue
            said = rng.choice(list(facts.of[target].values()))
            if _is_said_before(facts, [place, target], said.answer):
                continue
            asked = RELATIONS[said.relation].ask.format(x=GAP)
            yield Draft(
                kind=BRIDGE,
                form=f"gap-{said.relation}",
                question=f"{asked} {GAP} is the name left out here: “{sentence.replace(name, GAP)}”",
                needs=(Need(place, (name,), sentence), facts.need(target, said.answer)),
                answer=said.answer,
                links=(name,),
            )
            break


def comparison_drafts(facts: Facts, rng: random.Random) -> Iterator[Draft]:
    """Yield questions which of two subjects was first."""
    pairs: list[tuple[Relation, int, int]] = []
    for relation in RELATIONS.values():
        if relation.compare:
            places = _shuffled(facts.saying[relation.name], rng)
            pairs += [(relation, a, b) for a, b in zip(places[::2], places[1::2], strict=False)]
    for relation, a, b in _shuffled(pairs, rng):
        first, second = (facts.of[place][relation.name].answer for place in (a, b))
        if abs(int(first) - int(second)) >= FAR:
            yield Draft(
                kind=COMPARISON,
                form=relation.name,
                question=relation.compare.format(a=facts.subject(a), b=facts.subject(b)),
                needs=(facts.need(a, first), facts.need(b, second)),
                answer=facts.subject(a if int(first) < int(second) else b),
            )


def claim_drafts(facts: Facts, rng: random.Random) -> Iterator[Draft]:
    """Yield answers to verify: half of them as the document says, half with what another document says of its own."""
    for place, said in _said(facts, rng):
        others = [facts.of[other][said.relation].answer for other in facts.saying[said.relation][:100]]
        others = [other for other in others if other != said.answer and not _may_hold(said, other)]
        refuted = bool(others) and rng.random() < 0.5
        question = RELATIONS[said.relation].ask.format(x=facts.subject(place))
        yield Draft(
            kind=CLAIM,
            form=said.relation,
            question=f"{question} Check this answer: {rng.choice(others) if refuted else said.answer}.",
            needs=(facts.need(place, said.answer),),
            answer="refuted" if refuted else "supported",
        )


def _may_hold(said: Statement, other: str) -> bool:
    """Return whether another answer may hold beside that of a statement: places lie in places, names have forms."""
    return "place" in RELATIONS[said.relation].names or bool({*said.answer.split()} & {*other.split()})


def _said(facts: Facts, rng: random.Random) -> list[tuple[int, Statement]]:
    return _shuffled([(place, said) for place, own in facts.of.items() for said in own.values()], rng)


def _asked(facts: Facts, place: int, rng: random.Random) -> Relation:
    return RELATIONS[rng.choice(sorted(facts.of[place]))]


def _leads(facts: Facts, chain: Sequence[int], asked: Relation) -> list[tuple[int, str]]:
    """Return the passages, with their relations, that lead to the first of a chain, if what they name is of a kind of
    which `asked` can be asked."""
    return [
        (source, name)
        for source, name in facts.leading.get(chain[0], ())
        if source not in chain and set(RELATIONS[name].names) & set(asked.of)
    ]


def _is_said_before(facts: Facts, chain: Sequence[int], answer: str) -> bool:
    """Return whether an answer already stands in a passage before the last."""
    return any(answer in facts.graph.passages[place].text for place in chain[:-1])


def _shuffled(items: Sequence[Item], rng: random.Random) -> list[Item]:
    order = list(items)
    rng.shuffle(order)
    return order
