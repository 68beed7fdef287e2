"""The oracle teacher's search for missing evidence: one move a turn, until nothing is missing or nothing helps."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import islice

from harness1.env.view import View
from harness1.memory.question import normalised_name
from harness1.memory.sentences import split
from harness1.policy.scripted import FAN_OUT, search_call
from harness1.policy.teacher.evidence import SeenEvidence
from harness1.policy.teacher.queries import Lead, beside, leads, parts, patterns, subject
from harness1.records import ToolCall

FAN = 4
PLAN = ("names", "read", "names", "page", "grep", "parts")
"""The kinds of moves, in rotation; one that has nothing to offer is skipped."""
PATIENCE = 7
"""Moves without new evidence after which the search is given up."""
MOST = 12
"""Most moves in all."""
SENTENCES = 4
"""A text with this many shown sentences may have more, and so may one with as many as any other."""
CHARACTERS = 2000
"""Most characters of a query or claim."""


@dataclass(frozen=True)
class Move:
    """An action, the kind of reason for it, and the shown handles and names that the reason mentions."""

    call: ToolCall
    kind: str
    source: tuple[str, ...] = ()
    topic: tuple[str, ...] = ()


class TeacherSearch:
    """A chooser of queries, patterns and documents to read. It repeats only the question, to get its next page.

    Args:
        greps: begin with a pattern, if the first missing name has several words.
    """

    def __init__(self, greps: bool = False) -> None:
        self._greps = greps
        self._asked: set[str] = set()
        self._read: set[str] = set()
        self._place = 0
        self._found = 0
        self._fruitless = 0
        self._moves = 0

    def next(self, view: View, evidence: SeenEvidence, tools: Set[str]) -> Move | None:
        """Return the next move; None if all is found or the search is given up."""
        if not self._asked:
            query = opening(view)
            self._asked |= {normalised_name(query), normalised_name(view.query)}
            return Move(_search(query), "open", topic=subject(view.query))
        found = len(evidence.gold)
        self._fruitless = 0 if found > self._found else self._fruitless + 1
        self._found = found
        self._moves += 1
        if evidence.complete or self._fruitless > PATIENCE or self._moves > MOST:
            return None
        if self._greps and "grep_corpus" in tools:
            self._greps = False
            if (move := self._grep(view, evidence, words=False)) is not None:
                return move
        for _ in PLAN:
            kind = PLAN[self._place % len(PLAN)]
            self._place += 1
            if (move := self._move(kind, view, evidence, tools)) is not None:
                return move
        return None

    def read(self, evidence: SeenEvidence, kind: str = "read") -> Move | None:
        """Read a gold document that may not have been shown in full, the latest first."""
        most = max((len(split(document.text)) for document in evidence.documents.values()), default=0)
        for document in reversed(evidence.gold):
            if document.handle not in self._read and len(split(document.text)) >= min(SENTENCES, most):
                self._read.add(document.handle)
                call = ToolCall("read_document", {"doc_id": document.handle})
                return Move(call, kind, (document.handle,), subject(evidence.score.question))
        return None

    def _move(self, kind: str, view: View, evidence: SeenEvidence, tools: Set[str]) -> Move | None:
        match kind:
            case "read" if "read_document" in tools:
                return self.read(evidence)
            case "grep" if "grep_corpus" in tools:
                return self._grep(view, evidence)
            case "names":
                return self._names(view, evidence, FAN if FAN_OUT in tools else 1)
            case "parts":
                return self._parts(view, FAN if FAN_OUT in tools else 1)
            case "page" if view.query.strip() and not view.entities:
                return Move(_search(view.query), "page", topic=subject(view.query))
        return None

    def _names(self, view: View, evidence: SeenEvidence, fan: int) -> Move | None:
        for group in leads(view.query, evidence):
            chosen: list[Lead] = []
            for lead in group:
                if len(chosen) < fan and self._is_new(lead.query):
                    chosen.append(lead)
            if chosen:
                first = chosen[0]
                alike = (lead.name for lead in chosen if (lead.source, lead.detailed) == (first.source, first.detailed))
                kind = "detail" if first.detailed else "named" if first.source else "asked"
                source = (first.source,) if first.source else ()
                return Move(_search(*(lead.query for lead in chosen)), kind, source, tuple(dict.fromkeys(alike)))
        return None

    def _parts(self, view: View, fan: int) -> Move | None:
        chosen = list(islice((part for part in parts(view.query) if self._is_new(part)), fan))
        return Move(_search(*chosen), "part", topic=tuple(chosen)) if chosen else None

    def _grep(self, view: View, evidence: SeenEvidence, words: bool = True) -> Move | None:
        for pattern in patterns(view.query, evidence):
            if (words or " " in pattern) and self._is_new(f"grep {pattern}"):
                call = ToolCall("grep_corpus", {"pattern": pattern})
                return Move(call, "grep", topic=(pattern.removeprefix("(?i)"),))
        return None

    def _is_new(self, query: str) -> bool:
        """Return whether a query is new, and remember it."""
        key = normalised_name(query)
        if not key or key in self._asked:
            return False
        self._asked.add(key)
        return True


def opening(view: View) -> str:
    """Return the first query: the question, or if its entities have handles, these with the words before the first."""
    names = [name for name in view.entities.values() if name in view.query]
    return " ".join(filter(None, [*names, beside(view.query, names[0])])) if names else view.query


def shortened(text: str) -> str:
    """Cut a text to as many whole words as an argument may hold."""
    return text if len(text) <= CHARACTERS else text[:CHARACTERS].rpartition(" ")[0] or text[:CHARACTERS]


def _search(*queries: str) -> ToolCall:
    return search_call(*map(shortened, queries))
