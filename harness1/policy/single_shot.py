"""The baseline: one search for the question as it stands, then everything that came back, in rank order."""

from __future__ import annotations

from harness1.env.render import Context
from harness1.hashing import digest
from harness1.policy.policy import Decision
from harness1.records import Task, ToolCall
from harness1.tools.end_search import END_SEARCH

TOP = 30


class SingleShotPolicy:
    """Searches once, curates the hits best first (at most `TOP`), ends. `env.search.hits=30` gives a deep ranking.

    What the first search populated is the head of the same ranking, so the delivered order is the ranking's.
    """

    name = "single-shot"
    hash = digest(["single-shot", TOP])

    def open(self, task: Task, seed: int) -> SingleShotSession:
        return SingleShotSession(0)


class SingleShotSession:
    """One episode: search, curate, end."""

    def __init__(self, turn: int) -> None:
        self._turn = turn

    async def act(self, context: Context) -> Decision:
        self._turn += 1
        view = context.view
        if self._turn == 1:
            return Decision(
                (ToolCall("search_corpus", {"query": view.query}),), "Search for the question as it stands."
            )
        found = [hit.document.handle for hit in view.hits.get(1, [])][:TOP]
        if self._turn == 2 and found:
            return Decision((ToolCall("curate", {"add_ids": found}),), "Keep the ranking as it is.")
        return Decision((ToolCall(END_SEARCH, {"reasoning": "One search is all that this policy does."}),))

    def fork(self) -> SingleShotSession:
        return SingleShotSession(self._turn)
