"""The oracle: a policy with the gold and the usual tools, which shows what is attainable and checks the scoring."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from harness1.env.render import Context
from harness1.env.view import View
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.memory.entities import extract
from harness1.memory.question import SCANNED_CHARACTERS
from harness1.policy.policy import Decision
from harness1.policy.scripted import FAN_OUT, curate_call, search_call
from harness1.records import Gold, Task, ToolCall, UnitId
from harness1.tools.documents import END_SEARCH
from harness1.tools.tool import ToolSpec

BATCH = 5
LAST_TURNS = 2
"""Turns reserved for the last curation and the end."""


class OraclePolicy:
    """A policy that curates exactly the gold. Its queries come from the question and the gold documents found so far.

    Raises:
        UsageError: on opening, if the task's gold was not given.
    """

    name = "oracle"
    hash = digest(["oracle", 1])

    def __init__(self, golds: Mapping[str, Gold]) -> None:
        self._golds = golds

    def open(self, task: Task, seed: int) -> OracleSession:
        if task.task_id not in self._golds:
            raise UsageError(f"the oracle needs the gold of task {task.task_id}")
        return OracleSession(wanted(self._golds[task.task_id]))


def wanted(gold: Gold) -> tuple[frozenset[UnitId], ...]:
    """Return what must be curated: for each fact or relevant document, the units that each satisfy it."""
    if gold.facts is not None:
        return tuple(frozenset(UnitId(chunk_id) for chunk_id in fact) for fact in gold.facts)
    return tuple(frozenset({UnitId(doc_id)}) for doc_id, grade in gold.relevant.items() if grade > 0)


class OracleSession:
    """One episode with the gold, with a memory of the handles seen and of everything read and searched for."""

    def __init__(self, needs: tuple[frozenset[UnitId], ...]) -> None:
        self._needs = needs
        self._handles: dict[UnitId, str] = {}
        self._read: set[str] = set()
        self._texts: dict[UnitId, str] = {}
        self._asked: dict[str, None] = {}

    async def act(self, context: Context) -> Decision:
        view = context.view
        self._note(view)
        return Decision((self._next(view, context.tools),), "The gold decides.")

    def fork(self) -> OracleSession:
        return copy.deepcopy(self)

    def _next(self, view: View, tools: Sequence[ToolSpec]) -> ToolCall:
        names = {spec.name for spec in tools}
        gold = {unit_id: self._handles[unit_id] for need in self._needs for unit_id in need if unit_id in self._handles}
        missing = [need for need in self._needs if not need & gold.keys()]
        left = view.budget.turns_left()
        late = left is not None and left <= LAST_TURNS
        if (not missing or late) and (edit := self._edit(view, tools, gold)) is not None:
            return edit
        if not missing or late:
            return ToolCall(END_SEARCH, {"reasoning": "All gold is curated, or no turn is left."})
        unread = [handle for handle in gold.values() if handle not in self._read]
        if unread and "read_document" in names:
            self._read.add(unread[0])
            return ToolCall("read_document", {"doc_id": unread[0]})
        return self._search(view, names)

    def _edit(self, view: View, tools: Sequence[ToolSpec], gold: dict[UnitId, str]) -> ToolCall | None:
        """Curate missing gold and drop everything else; None if nothing has to change."""
        held = {entry.unit_id: entry for entry in view.curated}
        add = [handle for unit_id, handle in gold.items() if unit_id not in held]
        remove = [entry.handle for unit_id, entry in held.items() if unit_id not in gold]
        if not add and not remove:
            return None
        return curate_call(tools, dict.fromkeys(add, "very_high"), remove)

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
        for text in reversed(self._texts.values()):
            names = extract(text, SCANNED_CHARACTERS)
            yield from names
            # "Paris, Texas" is two names that find the place together.
            yield from (f"{name} {follower}" for name, follower in pairwise(names))
            yield from (f"{name} {view.query}" for name in names)

    def _note(self, view: View) -> None:
        """Remember handles, and the longest text shown of each gold document."""
        gold = frozenset().union(*self._needs)
        for document in view.documents.values():
            self._handles.setdefault(document.unit_id, document.handle)
            text = f"{document.title}. {document.text}"
            if document.unit_id in gold and len(text) > len(self._texts.get(document.unit_id, "")):
                self._texts[document.unit_id] = text
