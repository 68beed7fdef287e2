"""The oracles, which see the gold: one that curates it exactly, and a teacher whose choices a student can make."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from harness1.env.render import Context
from harness1.env.view import DocumentView, View, keep_longest
from harness1.errors import UsageError
from harness1.memory.entities import extract
from harness1.memory.question import SCANNED_CHARACTERS
from harness1.plain import digest
from harness1.policy.policy import CopiedSession, Decision, Session
from harness1.policy.scripted import FAN_OUT, curate_call, search_call
from harness1.records import Gold, Task, ToolCall, UnitId
from harness1.tools.documents import END_SEARCH
from harness1.tools.tool import ToolSpec

BATCH, LAST_TURNS = 5, 2  # queries at once, and turns reserved for the last curation and the end


class GoldPolicy:
    """A policy that is given the gold of its tasks. Opening raises UsageError if that of the task was not given."""

    name: str
    hash: str
    session: Callable[[tuple[frozenset[UnitId], ...], random.Random], Session]  # of `needs_of`, and its own generator

    def __init__(self, golds: Mapping[str, Gold]) -> None:
        self._golds = golds

    def open(self, task: Task, seed: int) -> Session:
        if task.task_id not in self._golds:
            raise UsageError(f"the {self.name.replace('-', ' ')} needs the gold of task {task.task_id}")
        return type(self).session(needs_of(self._golds[task.task_id]), random.Random(f"{task.task_id}/{seed}"))


def needs_of(gold: Gold) -> tuple[frozenset[UnitId], ...]:
    """Return what must be curated: for each fact or relevant document, the units that each satisfy it."""
    if gold.facts is not None:
        return tuple(frozenset(UnitId(chunk_id) for chunk_id in fact) for fact in gold.facts)
    return tuple(frozenset({UnitId(doc_id)}) for doc_id, grade in gold.relevant.items() if grade > 0)


class OracleSession(CopiedSession):
    """One episode with the gold, with a memory of what was seen, read and searched for."""

    def __init__(self, needs: tuple[frozenset[UnitId], ...], rng: random.Random) -> None:
        self._needs, self._evidence = needs, SeenEvidence(needs)
        self._read: set[str] = set()
        self._asked: dict[str, None] = {}

    async def act(self, context: Context) -> Decision:
        self._evidence.read(context.view)
        return Decision((self._next(context.view, context.tools),), "The gold decides.")

    def _next(self, view: View, tools: Sequence[ToolSpec]) -> ToolCall:
        names = {spec.name for spec in tools}
        seen = {document.unit_id: document.handle for document in self._evidence.documents.values()}
        gold = {unit_id: seen[unit_id] for need in self._needs for unit_id in need if unit_id in seen}
        missing = [need for need in self._needs if not need & gold.keys()]
        left = view.budget.turns_left()
        late = left is not None and left <= LAST_TURNS
        if not missing or late:
            held = {entry.unit_id: entry for entry in view.curated}
            add = [handle for unit_id, handle in gold.items() if unit_id not in held]
            remove = [entry.handle for unit_id, entry in held.items() if unit_id not in gold]
            if add or remove:
                return curate_call(tools, dict.fromkeys(add, "very_high"), remove)
            return ToolCall(END_SEARCH, {"reasoning": "All gold is curated, or no turn is left."})
        unread = [handle for handle in gold.values() if handle not in self._read]
        if unread and "read_document" in names:
            self._read.add(unread[0])
            return ToolCall("read_document", {"doc_id": unread[0]})
        return self._search(view, names)

    def _search(self, view: View, names: set[str]) -> ToolCall:
        fresh = [query for query in self._candidates(view) if query not in self._asked]
        # Without a new query, repeat the old ones in turn for their next pages.
        chosen = list(dict.fromkeys(fresh or self._asked))[: BATCH if FAN_OUT in names else 1]
        for query in chosen:
            self._asked.pop(query, None)
            self._asked[query] = None
        return search_call(*chosen)

    def _candidates(self, view: View) -> Iterator[str]:
        yield view.query
        yield from extract(view.query, SCANNED_CHARACTERS)
        # The gold found last is farthest along the chain.
        for document in reversed(self._evidence.gold):
            names = extract(f"{document.title}. {document.text}", SCANNED_CHARACTERS)
            yield from names
            # "Paris, Texas" is two names that find the place together.
            yield from (f"{name} {follower}" for name, follower in pairwise(names))
            yield from (f"{name} {view.query}" for name in names)


class OraclePolicy(GoldPolicy):
    """A policy that curates exactly the gold. Its queries come from the question and the gold found so far."""

    name = "oracle"
    hash = digest(["oracle", 1])
    session = OracleSession


class SeenEvidence:
    """The documents that an episode has shown so far, by handle, in the order seen; the gold only sorts them."""

    view: View

    def __init__(self, needs: tuple[frozenset[UnitId], ...]) -> None:
        self._needs = needs
        self.documents: dict[str, DocumentView] = {}

    def read(self, view: View) -> None:
        """Take in the documents that a view shows."""
        self.view = view
        for document in view.documents.values():
            keep_longest(self.documents, document)

    @property
    def gold(self) -> list[DocumentView]:
        """The gold documents, in the order seen."""
        gold = frozenset().union(*self._needs)
        return [document for document in self.documents.values() if document.unit_id in gold]

    @property
    def complete(self) -> bool:
        """True if a unit that satisfies it was seen for every need."""
        seen = {document.unit_id for document in self.documents.values()}
        return not any(need.isdisjoint(seen) for need in self._needs)

    def rivals(self) -> list[str]:
        """Return the handles of the documents that are not gold: by evidence, where they are ranked, or as seen."""
        gold = {document.handle for document in self.gold}
        return [handle for handle in dict.fromkeys((*self.view.ranked, *self.documents)) if handle not in gold]


FOLLOWED, GUESSES = 2, 2  # most searches that follow leads; fewest documents delivered while gold is missing, the best
DELIVERY = 1  # turns that the last curation needs
FALLOFF = 0.6  # each further lead is chosen this many times as often as the one before it
KEPT = 0.75  # share of the leads that an episode which draws them follows, where several are followed at once
REVISION = 4  # increased whenever the teacher decides differently


class LeadTeacherSession(CopiedSession):
    """One episode. It remembers what it saw and followed, and reads everything else from the view."""

    def __init__(self, needs: tuple[frozenset[UnitId], ...], rng: random.Random) -> None:
        self._evidence, self._rng = SeenEvidence(needs), rng
        self._draws = rng.random() < FALLOFF
        self._followed: set[str] = set()
        self._searches: set[int] = set()  # the turns that searched

    async def act(self, context: Context) -> Decision:
        self._evidence.read(context.view)
        self._searches.update(turn.turn for turn in context.view.turns.values() if turn.queries)
        return Decision((self._next(context, context.view),), "The gold decides.")

    def _next(self, context: Context, view: View) -> ToolCall:
        evidence = self._evidence
        if not evidence.documents and not self._searches:
            self._searches.add(context.turn)
            return search_call(view.handle or view.query)
        left = view.budget.turns_left()
        at_once = any(spec.name == FAN_OUT for spec in context.tools)
        missing = not evidence.complete or (at_once and len(self._searches) == 1)
        if missing and (left is None or left > DELIVERY) and (leads := self._leads(view, at_once)):
            self._searches.add(context.turn)
            return search_call(*leads)
        gold = {document.handle for document in evidence.gold}
        found = [handle for handle in dict.fromkeys((*view.ranked, *evidence.documents)) if handle in gold]
        others = [] if evidence.complete else evidence.rivals()[: max(0, GUESSES - len(found))]
        chosen = [*found, *others][: view.cap]
        held = [entry.handle for entry in view.curated]
        add = [handle for handle in chosen if handle not in held]
        remove = [handle for handle in held if handle not in chosen]
        if add:
            return curate_call(context.tools, dict.fromkeys(add, "high"), remove)
        return ToolCall("curate", {"remove_ids": remove}) if chosen and remove else ToolCall(END_SEARCH)

    def _leads(self, view: View, at_once: bool) -> list[str]:
        shown = [lead for lead in view.leads if lead.name not in self._followed]
        if not shown or len(self._searches) > FOLLOWED:
            return []
        if at_once:
            drawn = [lead for lead in shown if self._rng.random() < KEPT] if self._draws else shown
            chosen = drawn or shown[:1]
        else:
            weights = [FALLOFF**place for place in range(len(shown))]
            chosen = self._rng.choices(shown, weights) if self._draws else shown[:1]
        self._followed.update(lead.name for lead in chosen)
        return [lead.entity or lead.name for lead in chosen]


class LeadTeacher(GoldPolicy):
    """Search the question; follow leads while gold is missing; edit the curated set to what was found; end.

    Where one call can search several leads, it follows all that are shown at once, and the first time even if nothing
    is missing: a student cannot tell whether something is, and what they bring costs it little. The first episode of a
    task follows the first leads, its others draw them, so that the best of several shows which lead was worth it. It
    needs the mechanisms `rank` and `leads`.
    """

    name = "lead-teacher"
    hash = digest([name, FOLLOWED, GUESSES, FALLOFF, KEPT, REVISION])
    session = LeadTeacherSession
