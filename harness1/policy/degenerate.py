"""Policies that a reward must not pay: each does one thing, whatever the question and whatever comes back.

`harness1 rl check` plays them over a task set. They see what every policy sees, and use no more of it than is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from harness1.env.render import Context
from harness1.env.view import View
from harness1.hashing import digest
from harness1.policy.actions import is_late
from harness1.policy.policy import Decision
from harness1.records import Task, ToolCall
from harness1.tools.end_search import END_SEARCH
from harness1.tools.tool import ToolSpec

REPEATS = 10
"""Searches of the query repeater."""
ROUNDS = 2
"""How often the tool spammer uses each tool."""
REVISION = 1
"""Counted up whenever one of them decides differently."""

END = ToolCall(END_SEARCH, {"reasoning": "This policy does no more."})
Rule = Callable[[int, Context], ToolCall]
"""The action of a turn, counted from 0."""


def no_op(turn: int, context: Context) -> ToolCall:
    """Ends at once, with nothing."""
    return END


def stop_at_once(turn: int, context: Context) -> ToolCall:
    """Searches for the question as it stands, and delivers whatever that populated."""
    return _search(context.view.query) if turn == 0 else END


def curate_everything(turn: int, context: Context) -> ToolCall:
    """Searches for the question page by page, and curates all that comes until the set is full."""
    view = context.view
    if len(view.curated) >= view.cap or is_late(view) or (turn > 1 and turn % 2 == 1 and not view.hits.get(turn)):
        return END if turn else _search(view.query)
    return _curate(_newest(view)) if turn % 2 else _search(view.query)


def query_repeater(turn: int, context: Context) -> ToolCall:
    """Asks the same again and again, and curates nothing."""
    return _search(context.view.query) if turn < REPEATS else END


def tool_spammer(turn: int, context: Context) -> ToolCall:
    """Uses every tool in turn, on single words of the question and on the documents that were shown last; it curates
    all that it can see."""
    specs = [spec for spec in context.tools if spec.name != END_SEARCH]
    if turn >= ROUNDS * len(specs):
        return END
    words = context.view.query.split() or ["the"]
    return _spam(specs[turn % len(specs)], words[turn % len(words)], context.view)


def id_inventor(turn: int, context: Context) -> ToolCall:
    """Curates ids out of its own head, and documents whose very ids stand in the question: after a search, for nothing
    is curated that none has found, but with no eye on what that search found. The rest it takes out again."""
    view = context.view
    if turn == 0:
        return _curate([f"D{number}" for number in range(1, 6)] + [f"doc_{number}" for number in range(5)])
    if turn == 1:
        return _search(view.query)
    named = [document.handle for document in view.documents.values() if _stands_in(document.unit_id, view.query)]
    others = [entry.handle for entry in view.curated if entry.handle not in named]
    if turn > 2 or not (named or others):
        return END
    return ToolCall("curate", {"add_ids": named, "remove_ids": others})


class ReflexPolicy:
    """A policy that is a rule: the turn and what is shown decide."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hash = digest(["degenerate", name, REVISION])

    def open(self, task: Task, seed: int) -> ReflexSession:
        return ReflexSession(RULES[self.name], 0)


class ReflexSession:
    """One episode of a rule."""

    def __init__(self, rule: Rule, turn: int) -> None:
        self._rule, self._turn = rule, turn

    async def act(self, context: Context) -> Decision:
        action = self._rule(self._turn, context)
        self._turn += 1
        return Decision((action,), "This policy does not think.")

    def fork(self) -> ReflexSession:
        return ReflexSession(self._rule, self._turn)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.__name__.replace("_", "-"): rule
        for rule in (no_op, stop_at_once, curate_everything, query_repeater, tool_spammer, id_inventor)
    }
)
"""The rule of each of these policies, by the policy's name."""


def _search(query: str) -> ToolCall:
    return ToolCall("search_corpus", {"query": query})


def _curate(handles: Sequence[str]) -> ToolCall:
    return ToolCall("curate", {"add_ids": list(handles)})


def _newest(view: View) -> list[str]:
    """The documents of the last turn that showed hits."""
    return [hit.document.handle for hit in view.hits.get(max(view.hits, default=0), ())]


def _spam(spec: ToolSpec, word: str, view: View) -> ToolCall:
    handles = _newest(view)
    fillings: dict[str, Any] = {
        "query": word,
        "queries": [word, f"{word} {word}"],
        "pattern": re.escape(word),
        "claim": word,
        "doc_id": handles[0] if handles else "D1",
        "doc_ids": handles[:3],
        "add_ids": list(view.documents),
    }
    properties = spec.parameters["properties"]
    return ToolCall(spec.name, {name: value for name, value in fillings.items() if name in properties})


def _stands_in(unit_id: str, query: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(unit_id)}(?!\w)", query) is not None
