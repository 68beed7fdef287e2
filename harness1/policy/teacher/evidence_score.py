"""The value of a document for a question: its rank, its title in the question, and its title in strong documents."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness1.env.view import HitView, View
from harness1.memory.entities import FUNCTION_WORDS, extract
from harness1.memory.question import (
    LONGEST_TITLE,
    SCANNED_CHARACTERS,
    head,
    is_whole,
    normalised_name,
    relatedness,
    relation_stems,
)

SOURCE = 0.1
"""A document weaker than this (below about rank 10 of the plain ranking) contributes no names."""
PROOF = 0.3
"""A link at least this strong counts as evidence beyond the plain ranking."""
HOPS = 2
DECAY = 0.7
"""Share of a link's strength that the linked document passes on to the documents it names."""


@dataclass
class ScoredDocument:
    """A document as the policy has seen it. `rank` is its place in the ranking of the plain question, from 0."""

    handle: str
    title: str
    head: str
    rank: int | None = None
    via: dict[str, int] = field(default_factory=dict)
    """Rank at which each other query found it, by normalised query."""
    names: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By normalised name: the number of relation words near it, and its spelling."""
    base: float = 0.0
    match: float = 0.0
    link: float = 0.0

    @property
    def score(self) -> float:
        return self.base + self.match + self.link

    @property
    def proven(self) -> bool:
        """True if there is evidence for it beyond the plain ranking."""
        return self.match >= 0.5 or self.link >= PROOF


class EvidenceScore:
    """Candidates collected from hits, and scored against each other.

    Args:
        question: as the first view shows it.
        shortest_page: fewest ranks that a page of hits for the plain question takes up, even if it has no hits.
    """

    def __init__(self, question: str, shortest_page: int = 0) -> None:
        self.question = question
        self.flat = f" {normalised_name(question)} "
        self.relations = relation_stems(question)
        self.candidates: dict[str, ScoredDocument] = {}
        self.leads: dict[str, tuple[float, str]] = {}
        """Names worth a search: by normalised name, the value and the spelling."""
        self.ranked = 0
        """Ranks for the plain question that were read, page by page."""
        self._turn, self._shortest_page = 0, shortest_page

    def read(self, view: View) -> None:
        """Add the hits of the turn that has just finished, if they are new."""
        turn = max(view.turns, default=0)
        if turn <= self._turn:
            return
        self._turn = turn
        queries, hits = view.turns[turn].queries, view.hits.get(turn, ())
        for hit in hits:
            self._read_hit(hit, queries)
        whole = {number for number, query in enumerate(queries) if is_whole(query, view.query)}
        if whole:
            found = sum(any(query in whole for query, _ in hit.found_by) for hit in hits)
            self.ranked += max(self._shortest_page, found)

    def _read_hit(self, hit: HitView, queries: tuple[str, ...]) -> None:
        document = hit.document
        candidate = self.candidates.setdefault(
            document.handle, ScoredDocument(document.handle, document.title, head(document.title))
        )
        for query, rank in hit.found_by:
            if is_whole(queries[query], self.question):
                candidate.rank = rank + self.ranked if candidate.rank is None else candidate.rank
            else:
                candidate.via.setdefault(head(queries[query]), rank)
        for name in extract(document.text, SCANNED_CHARACTERS):
            key = head(name)
            if len(key) > 2 and not key.isdecimal() and f" {key} " not in f" {candidate.head} ":
                near = relatedness(document.text, name, self.relations)
                if near >= candidate.names.get(key, (0, ""))[0]:
                    candidate.names[key] = (near, name)

    def update(self) -> list[ScoredDocument]:
        """Rescore everything and return the candidates best first, ties in the order found."""
        candidates = self.candidates.values()
        by_head = self._by_head()
        named = {key for key in by_head if key not in FUNCTION_WORDS and f" {key} " in self.flat}
        for candidate in candidates:
            candidate.base = 0.0 if candidate.rank is None else 1 / (2 + candidate.rank)
            candidate.match = self._match(candidate, named, len(by_head.get(candidate.head, ())))
            candidate.link = 0.0
        self._follow(self._targets(by_head))
        return sorted(candidates, key=lambda candidate: -candidate.score)

    def _by_head(self) -> dict[str, list[ScoredDocument]]:
        groups: dict[str, list[ScoredDocument]] = {}
        for candidate in self.candidates.values():
            if candidate.head:
                groups.setdefault(candidate.head, []).append(candidate)
        return groups

    def _match(self, candidate: ScoredDocument, named: set[str], namesakes: int) -> float:
        """Return how surely the question names this document: less for part of a longer name or for namesakes."""
        if candidate.head not in named:
            return 0.0
        detail = re.search(r"\(([^)]*)\)\s*$", candidate.title[:LONGEST_TITLE])
        if detail and f" {normalised_name(detail.group(1))} " in self.flat:
            return 1.0
        part = any(key != candidate.head and f" {candidate.head} " in f" {key} " for key in named)
        return (0.25 if part else 1.0) / namesakes

    def _targets(self, by_head: Mapping[str, list[ScoredDocument]]) -> dict[str, list[tuple[ScoredDocument, float]]]:
        """Return the documents that a name may mean, with shares: an equal title, or a near one that the name found."""
        targets = {key: [(found, 1 / len(group)) for found in group] for key, group in by_head.items()}
        for candidate in self.candidates.values():
            title = set(candidate.head.split())
            for query, rank in candidate.via.items():
                words = set(query.split())
                nested = title and title != words and (title <= words or words <= title)
                if rank < 3 and nested and len(title & words) >= 0.4 * len(title | words):
                    targets.setdefault(query, []).append((candidate, 0.5 / len(by_head[candidate.head])))
        return targets

    def _follow(self, targets: Mapping[str, list[tuple[ScoredDocument, float]]]) -> None:
        """Pass the strength of strong documents on to those that they name, over two hops."""
        candidates = self.candidates.values()
        counts = Counter(key for candidate in candidates for key in candidate.names)
        strength = {candidate.handle: max(candidate.base, candidate.match) for candidate in candidates}
        self.leads = {}
        for _ in range(HOPS):
            for candidate in candidates:
                if strength[candidate.handle] < SOURCE:
                    continue
                for key, (near, spelling) in candidate.names.items():
                    value = strength[candidate.handle] * (0.4 + 0.2 * near) * (1.5 if " " in key else 1.0)
                    value /= 1 + math.log(counts[key])
                    if value > self.leads.get(key, (0.0, ""))[0]:
                        self.leads[key] = (value, spelling)
                    for target, share in targets.get(key, ()):
                        if target is not candidate:
                            target.link = max(target.link, value * share)
            for candidate in candidates:
                strength[candidate.handle] = max(strength[candidate.handle], DECAY * min(1.0, candidate.link))
