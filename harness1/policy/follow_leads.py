"""A policy that leaves judgement to the harness: it searches the question and the leads, and delivers the evidence
order. It needs `env.evidence.rank` and `env.leads.on`."""

from __future__ import annotations

from harness1.env.render.context import Context
from harness1.hashing import digest
from harness1.policy.actions import curate_call, is_late, search_call
from harness1.policy.baselines import RuleSession
from harness1.policy.policy import Decision
from harness1.records import Tag, Task, ToolCall
from harness1.tools.end_search import END_SEARCH

FAN = 5
"""Leads searched in one turn."""


class FollowLeads:
    """Searches what the harness says is worth a search, and delivers its best documents.

    Args:
        pages: how often the question itself is searched.
        limit: the most documents that it delivers.
    """

    def __init__(self, pages: int = 3, waves: int = 3, limit: int = 15) -> None:
        self.pages, self.waves, self.limit = pages, waves, limit
        self.name = "follow-leads"
        self.hash = digest([self.name, pages, waves, limit])

    def open(self, task: Task, seed: int) -> RuleSession:
        return RuleSession(self._decide)

    def _decide(self, at: int, context: Context) -> Decision:
        view = context.view
        if at < self.pages and not is_late(view):
            return Decision((search_call(view.query),), "Rank for the whole question.")
        if at < self.pages + self.waves and view.leads and not is_late(view):
            names = [lead.name for lead in view.leads[:FAN]]
            return Decision((search_call(*names),), f"Follow {', '.join(names)}.")
        best: dict[str, Tag] = dict.fromkeys(view.ranked[: self.limit], "high")
        if best and [entry.handle for entry in view.curated] != list(best):
            drop = [entry.handle for entry in view.curated]
            return Decision((curate_call(context.tools, best, drop),), "Deliver the best.")
        return Decision((ToolCall(END_SEARCH, {"reasoning": "The leads are followed."}),))
