"""A policy that leaves judgement to the harness: it searches the question, then the leads, and delivers the evidence
order. It needs `env.evidence.rank` and `env.leads.on`."""

from __future__ import annotations

from harness1.env.render.context import Context
from harness1.hashing import digest
from harness1.policy.actions import curate_call, is_late, search_call
from harness1.policy.policy import Decision, Session
from harness1.records import Tag, Task, ToolCall
from harness1.tools.end_search import END_SEARCH

LIMIT, PAGES, WAVES, FAN = 15, 2, 3, 5
"""Documents delivered, pages of the question's ranking, turns that follow leads, and leads searched in one of them."""


class FollowLeads:
    """Searches what the harness says is worth a search, and delivers its best documents."""

    name = "follow-leads"
    hash = digest([name, LIMIT, PAGES, WAVES, FAN])

    def open(self, task: Task, seed: int) -> Session:
        return self

    async def act(self, context: Context) -> Decision:
        view, turn = context.view, max(context.view.turns, default=0)
        best: dict[str, Tag] = dict.fromkeys(view.ranked[: min(LIMIT, view.cap)], "high")
        drop = [entry.handle for entry in view.curated]
        if turn < PAGES and not (turn and is_late(view)):
            return Decision((search_call(view.query),))
        if view.leads and turn < PAGES + WAVES and not is_late(view):
            return Decision((search_call(*[lead.name for lead in view.leads[:FAN]]),))
        if best and drop != list(best):
            return Decision((curate_call(context.tools, best, drop),))
        return Decision((ToolCall(END_SEARCH, {"reasoning": "The leads are followed."}),))

    def fork(self) -> Session:
        return self
