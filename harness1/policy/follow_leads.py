"""A policy that leaves judgement to the harness: it searches the question and the leads, and delivers the evidence
order. It needs `env.evidence.rank` and `env.leads.on`."""

from __future__ import annotations

import copy

from harness1.env.render.context import Context
from harness1.env.render.view import View
from harness1.hashing import digest
from harness1.policy.actions import curate_call, is_late, search_call
from harness1.policy.policy import Decision
from harness1.records import Tag, Task, ToolCall
from harness1.tools.end_search import END_SEARCH

LIMIT = 15
"""Documents delivered."""
PAGES, WAVES, FAN = 6, 3, 5
"""The most pages of the question's ranking, turns that follow leads, and leads searched in one turn."""


class FollowLeads:
    """Searches what the harness says is worth a search, and delivers its best documents."""

    name = "follow-leads"
    hash = digest([name, LIMIT, PAGES, WAVES, FAN])

    def open(self, task: Task, seed: int) -> FollowSession:
        return FollowSession()


class FollowSession:
    """One episode. A further page of the question is read as long as the last one brought something to deliver."""

    def __init__(self) -> None:
        self._pages = self._waves = 0

    async def act(self, context: Context) -> Decision:
        view = context.view
        best: dict[str, Tag] = dict.fromkeys(view.ranked[:LIMIT], "high")
        if not is_late(view) and self._brought(view, best):
            self._pages += 1
            return Decision((search_call(view.query),), "Rank for the whole question.")
        if not is_late(view) and view.leads and self._waves < WAVES:
            self._waves += 1
            names = [lead.name for lead in view.leads[:FAN]]
            return Decision((search_call(*names),), f"Follow {', '.join(names)}.")
        if best and [entry.handle for entry in view.curated] != list(best):
            drop = [entry.handle for entry in view.curated]
            return Decision((curate_call(context.tools, best, drop),), "Deliver the best.")
        return Decision((ToolCall(END_SEARCH, {"reasoning": "The leads are followed."}),))

    def fork(self) -> FollowSession:
        return copy.copy(self)

    def _brought(self, view: View, best: dict[str, Tag]) -> bool:
        """Return whether the question's ranking is worth another page."""
        newest = view.hits.get(max(view.turns, default=0), ())
        brought = any(hit.document.handle in best for hit in newest)
        return self._waves == 0 and self._pages < PAGES and (brought or self._pages == 0)
