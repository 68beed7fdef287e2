"""The scripted policy: it searches the question and what the harness says is worth a search, and delivers what the
harness ranks. It has no model and reads only the view.

1. Search the whole question, page by page, as long as a page brings something that would be delivered.
2. Search the leads, in three waves at most, until none is open.
3. Verify the best, curate with tags, end.

Where documents are not ranked (`env.evidence.rank`), they are taken in the order found, and the names in the question
are the leads. A transcript is pruned of what would not be delivered before it is too full.
"""

from __future__ import annotations

import copy

from harness1.env.render.context import Context
from harness1.env.render.view import View
from harness1.hashing import digest
from harness1.memory.question import claim, mentions
from harness1.policy.actions import FAN_OUT, SPARE_TURNS, curate_call, is_full, is_late, search_call
from harness1.policy.policy import Decision
from harness1.records import Tag, Task, ToolCall
from harness1.tools.end_search import END_SEARCH

LIMIT = 15
"""Documents delivered."""
PAGES, WAVES, FAN = 6, 3, 5
"""The most pages of the question's ranking, turns that follow leads, and leads searched in one turn."""
VERIFIED = 5
"""Documents verified: `very_high` if confirmed, else `high`; the rest are `fair`."""
REVISION = 2
"""Increased whenever this policy decides differently; the hash depends on it."""


class ScriptedPolicy:
    """The baseline to beat: follows leads and delivers the evidence order (ARCHITECTURE.md). It needs no model and no
    gold.

    Args:
        limit: the most documents that it delivers, 15 by default and up to 30.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.name = "scripted" if limit == LIMIT else f"scripted:{limit}"
        self.hash = digest(["scripted", limit, REVISION])

    def open(self, task: Task, seed: int) -> ScriptedSession:
        return ScriptedSession(self.limit)


class ScriptedSession:
    """One episode of the script."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pages = self._waves = 0
        self._asked: set[str] = set()
        self._found: dict[str, None] = {}
        self._verified = self._curated = False

    async def act(self, context: Context) -> Decision:
        view, names = context.view, {spec.name for spec in context.tools}
        newest = [hit.document.handle for hit in view.hits.get(max(view.turns, default=0), ())]
        self._found |= dict.fromkeys(newest)
        best = list(dict.fromkeys((*view.ranked, *self._found)))[: min(self._limit, view.cap)]
        if is_full(view) and "prune_chunks" in names and (useless := self._useless(view, best)):
            return Decision((ToolCall("prune_chunks", {"doc_ids": useless}),), "Make room: these are not worth it.")
        brought = not set(best).isdisjoint(newest)
        if not self._pages or (brought and self._pages < PAGES and not self._waves and not is_late(view)):
            self._pages += 1
            return Decision((search_call(view.query),), "Search for the whole question.")
        fan = FAN if FAN_OUT in names else 1
        if not is_late(view) and (leads := self._leads(view, fan)):
            return Decision((search_call(*leads),), f"Follow {', '.join(leads)[:200]}.")
        return self._deliver(context, names, best)

    def fork(self) -> ScriptedSession:
        return copy.deepcopy(self)

    def _leads(self, view: View, fan: int) -> list[str]:
        """Return the next searches; none when the waves are used up."""
        told = [lead.name for lead in view.leads] if view.ranked else mentions(view.query)
        leads = [name for name in dict.fromkeys(told) if name not in self._asked][:fan]
        self._asked.update(leads)
        self._waves += 1
        return leads if self._waves <= WAVES else []

    def _useless(self, view: View, best: list[str]) -> list[str]:
        """Return shown documents that would not be delivered."""
        shown = {hit.document.handle: None for hits in view.hits.values() for hit in hits}
        return [handle for handle in shown if handle not in best]

    def _deliver(self, context: Context, names: set[str], best: list[str]) -> Decision:
        """Verify, curate, end: one turn each."""
        view = context.view
        left = view.budget.turns_left()
        if not self._verified and "verify" in names and best and (left is None or left >= SPARE_TURNS):
            self._verified = True
            call = ToolCall("verify", {"doc_ids": best[:VERIFIED], "claim": claim(view.query)})
            return Decision((call,), "Check the best documents before they are called certain.")
        if not self._curated and best:
            self._curated = True
            confirmed = {verdict.handle for verdict in view.verdicts if verdict.label == "yes"}
            tags: dict[str, Tag] = dict.fromkeys(best, "fair")
            tags |= {each: "very_high" if each in confirmed else "high" for each in best[:VERIFIED]}
            # The set is emptied first: the delivered order must be the evidence order.
            drop = [entry.handle for entry in view.curated]
            return Decision((curate_call(context.tools, tags, drop),), f"Keep the best {len(best)} documents.")
        return Decision((ToolCall(END_SEARCH, {"reasoning": "The leads are followed and the best is curated."}),))
