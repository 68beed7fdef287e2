"""Other documents that answer as well: found by search, they join the gold, or the task is dropped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness1.errors import InfrastructureFault
from harness1.memory import sentences
from harness1.memory.question import normalised_name
from harness1.records import DocId, Record
from harness1.retrieval.protocol import RetrievalFault, Retriever, SearchRequest
from harness1.tasks.corpus_graph import CorpusGraph, Passage
from harness1.tasks.drafts import Draft, Need
from harness1.tasks.quoting import YEAR, whole

SEARCHED = 20
"""Documents that are read for each piece of evidence."""
ALIKE = 0.6
"""Share of the words of two sentences in common above which one says what the other does."""
MOST_GOLD = 8
_WORD = re.compile(r"\w+")
Said = tuple[str, frozenset[str]]
"""A sentence and its words in small letters."""


class MadeTask(Record, kw_only=True):
    """A draft with its gold."""

    draft: Draft
    gold: tuple[DocId, ...]
    reach: float
    """The share of the gold that one search for the question finds."""


class Reader:
    """Reads a corpus for other documents that serve as evidence."""

    def __init__(self, graph: CorpusGraph, retriever: Retriever) -> None:
        self._graph, self._retriever = graph, retriever
        self._places = {passage.doc_id: place for place, passage in enumerate(graph.passages)}
        self._said: dict[int, list[Said]] = {}

    async def gold(self, drafts: Sequence[Draft]) -> list[tuple[DocId, ...] | None]:
        """Return the gold of each draft: its own passages, and others that say the same; None if a passage holds the
        names of a need apart from each other, which leaves open whether it answers, or if too many answer.

        Raises:
            InfrastructureFault: the index does not answer.
        """
        needs = [(at, need) for at, draft in enumerate(drafts) for need in draft.needs]
        found = await self._near([need.quoted or " ".join(need.names) for _, need in needs])
        gold: list[dict[DocId, None] | None] = [
            {self._graph.passages[need.passage].doc_id: None for need in draft.needs} for draft in drafts
        ]
        for (at, need), places in zip(needs, found, strict=True):
            known = gold[at]
            for place in places:
                passage = self._graph.passages[place]
                if known is None or passage.doc_id in known:
                    continue
                serves = _says(need, self._said_at(place)) if need.quoted else _serves(need, passage)
                if serves is None:
                    known = gold[at] = None
                elif serves:
                    known[passage.doc_id] = None
        return [tuple(each) if each is not None and len(each) <= MOST_GOLD else None for each in gold]

    def _said_at(self, place: int) -> list[Said]:
        """Return the sentences of a passage, with the words of each."""
        if (said := self._said.get(place)) is None:
            cut = sentences.split(self._graph.passages[place].text)
            said = self._said[place] = [(each, frozenset(_WORD.findall(each.lower()))) for each in cut]
        return said

    async def with_gold(self, drafts: Sequence[Draft], k: int) -> list[MadeTask]:
        """Return the drafts that have a clear gold (see `gold`), with the share of it among the first `k` documents
        that one search for the question finds."""
        golds = await self.gold(drafts)
        clear = [(draft, gold) for draft, gold in zip(drafts, golds, strict=True) if gold is not None]
        found = await self._near([draft.question for draft, _ in clear])
        made = []
        for (draft, gold), places in zip(clear, found, strict=True):
            seen = {self._graph.passages[place].doc_id for place in places[:k]}
            made.append(MadeTask(draft=draft, gold=gold, reach=len(seen.intersection(gold)) / len(gold)))
        return made

    async def _near(self, queries: Sequence[str]) -> list[list[int]]:
        """Return the places of the documents that each query finds, best first."""
        answers = await self._retriever.search([SearchRequest(query, SEARCHED) for query in queries])
        places = []
        for answer in answers:
            if isinstance(answer, RetrievalFault):
                raise InfrastructureFault(f"the index does not answer: {answer}")
            documents = dict.fromkeys(hit.chunk.doc_id for hit in answer.hits)
            places.append([self._places[doc_id] for doc_id in documents if doc_id in self._places])
        return places


def _serves(need: Need, passage: Passage) -> bool | None:
    """Return whether a passage holds the names of a need; None if that cannot be told."""
    wanted = [f" {normalised_name(name)} " for name in need.names]
    title = f" {normalised_name(passage.subject)} "
    text = f" {normalised_name(passage.text)} "
    if not all(name in text or name in title for name in wanted):
        return False
    if len(wanted) == 1:
        return True if _has_whole(passage.text, need.names[0]) else None
    if title == wanted[0]:
        return True
    said = (f" {normalised_name(each)} " for each in sentences.split(passage.text))
    if not any(all(name in each for name in wanted) for each in said):
        return None
    # A year stands beside a name by chance too often.
    return None if any(YEAR.fullmatch(name) for name in need.names) else True


def _has_whole(text: str, name: str) -> bool:
    """Return whether a name stands in a text, somewhere not within a longer name."""
    return any(
        whole(text[: found.start()][-80:], text[found.end() :][:80]) for found in re.finditer(re.escape(name), text)
    )


def _says(need: Need, said: Sequence[Said]) -> bool | None:
    """Return whether one of some sentences says nearly the same as that of a need; None if one says it with other
    figures or names."""
    own = set(_WORD.findall(need.quoted.lower()))
    alike = [each for each, words in said if _alike(own, words)]
    figures = _figures(need.quoted)
    same = (each for each in alike if _figures(each) == figures and all(name in each for name in need.names))
    return True if any(same) else None if alike else False


def _figures(sentence: str) -> set[str]:
    return {word for word in _WORD.findall(sentence) if word[0].isdigit()}


def _alike(first: set[str], second: frozenset[str]) -> bool:
    return len(second) >= ALIKE * len(first) and len(first & second) >= ALIKE * len(first | second)
