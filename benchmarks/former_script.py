"""The scripted policy as it was when it judged by itself: a peer for the harness's own ranking and leads.

1. Search the whole question, page by page, until its plain ranking is known as far down as the answer may reach.
2. Fan out over the names in the question, then over names in strong documents, best first, in three waves.
3. Score a document by its plain rank, its title in the question, and its title in strong documents (two hops).
4. Verify the best, curate with tags, drop populated documents that are not worth it, stop.

A transcript is pruned of documents that are not worth it before it is too full.
"""

from __future__ import annotations

import copy

from harness1.env.render.context import Context
from harness1.env.render.view import View
from harness1.hashing import digest
from harness1.memory.question import claim, head, mentions, normalised_name
from harness1.policy.policy import Decision
from harness1.policy.scripted import SPARE_TURNS, curate_call, is_full, is_late, search_call
from harness1.policy.teacher.evidence_score import EvidenceScore, ScoredDocument
from harness1.records import Tag, Task, ToolCall
from harness1.tools.end_search import END_SEARCH

LIMIT = 15
"""Documents delivered when there is only the plain ranking to go by."""
WAVES = 3
FAN = 5
LEAD = 0.08
"""A name worth less than this is not searched."""
TRIM = 0.8
"""Share of the limit that is delivered when at least two documents have evidence beyond the plain ranking."""
VERIFIED = 5
REVISION = 1
"""The revision that the script had when it was frozen."""


class FormerScript:
    """Searches the question, then follows names. It needs no model and no gold.

    Args:
        limit: the most documents that it delivers, 15 by default and up to 30.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.name = "former"
        self.hash = digest(["scripted", limit, REVISION])

    def open(self, task: Task, seed: int) -> FormerSession:
        return FormerSession(self.limit)


class FormerSession:
    """One episode of the script."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._score: EvidenceScore | None = None
        self._asked: set[str] = set()
        self._waves = 0
        self._verified = False
        self._curated = False

    async def act(self, context: Context) -> Decision:
        view = context.view
        names = {spec.name for spec in context.tools}
        if self._score is None:
            self._score = EvidenceScore(view.query, shortest_page=1)  # an empty page is the last one
            self._asked.add(normalised_name(view.query))
            return Decision((search_call(view.query),), "Rank for the whole question first.")
        self._score.read(view)
        if is_full(view) and "prune_chunks" in names and (useless := self._useless(self._score, view)):
            return Decision((ToolCall("prune_chunks", {"doc_ids": useless}),), "Make room: these are not worth it.")
        if not is_late(view) and (search := self._search(self._score, view, names)) is not None:
            return search
        return self._deliver(self._score, context, names)

    def fork(self) -> FormerSession:
        return copy.deepcopy(self)

    def _search(self, score: EvidenceScore, view: View, names: set[str]) -> Decision | None:
        """Return the next search, or None when the waves are used up or nothing is worth a query."""
        missing = self._limit - score.ranked
        page = len(view.hits.get(1, ()))
        if missing > page > 0 and self._waves == 0 and score.ranked % page == 0:
            return Decision((search_call(view.query),), "The ranking must reach further down.")
        if self._waves >= WAVES:
            return None
        self._waves += 1
        fan = FAN if "fan_out_search" in names else 1
        queries = self._leads(score, fan, [view.query] if 0 < missing <= page and self._waves == 1 else [])
        if not queries:
            self._waves = WAVES
            return None
        return Decision((search_call(*queries),), f"Follow {', '.join(queries)[:200]}.")

    def _leads(self, score: EvidenceScore, fan: int, first: list[str]) -> list[str]:
        """Return the next queries: names in the question, then in strong documents, unless theirs was seen."""
        score.update()
        known = {candidate.head for candidate in score.candidates.values()}
        leads = [(1.0, name) for name in mentions(score.question)]
        leads += sorted(score.leads.values(), key=lambda lead: -lead[0])
        queries = list(first)
        for value, name in leads:
            if (
                len(queries) < fan
                and value > LEAD
                and head(name) not in known
                and normalised_name(name) not in self._asked
            ):
                queries.append(name)
                self._asked.add(normalised_name(name))
        return queries

    def _useless(self, score: EvidenceScore, view: View) -> list[str]:
        """Return shown documents that would not be delivered; their text has already been taken in."""
        best = {candidate.handle for candidate in score.update()[: self._limit]}
        shown = {hit.document.handle: None for hits in view.hits.values() for hit in hits}
        return [handle for handle in shown if handle not in best]

    def _deliver(self, score: EvidenceScore, context: Context, names: set[str]) -> Decision:
        """Verify, curate, end: one turn each."""
        view = context.view
        best = score.update()
        proven = [candidate for candidate in best if candidate.proven]
        size = round(TRIM * self._limit) if len(proven) >= 2 else self._limit
        chosen = best[: min(size, view.cap)]
        left = view.budget.turns_left()
        if not self._verified and "verify" in names and chosen and (left is None or left >= SPARE_TURNS):
            self._verified = True
            handles = [candidate.handle for candidate in chosen[:VERIFIED]]
            call = ToolCall("verify", {"doc_ids": handles, "claim": claim(view.query)})
            return Decision((call,), "Check the best documents before they are called certain.")
        if not self._curated and chosen:
            self._curated = True
            verdicts = {verdict.handle for verdict in view.verdicts if verdict.label == "yes"}
            tags = {candidate.handle: _tag(candidate, verdicts) for candidate in chosen}
            # The set is emptied first: the delivered order must be the order of the scores.
            drop = [entry.handle for entry in view.curated]
            reason = f"Keep the best {len(tags)} of {len(best)} documents."
            return Decision((curate_call(context.tools, tags, drop),), reason)
        return Decision((ToolCall(END_SEARCH, {"reasoning": "The names are followed and the best is curated."}),))


def _tag(candidate: ScoredDocument, verified: set[str]) -> Tag:
    if candidate.handle in verified and candidate.proven:
        return "very_high"
    return "high" if candidate.proven else "fair"
