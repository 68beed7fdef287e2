"""Baselines that nothing should lose to: random actions, a single search, and rules that a reward must not pay for."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from harness1.env.render.context import Context
from harness1.env.render.view import View
from harness1.hashing import digest
from harness1.policy.actions import curate_call, is_late, search_call
from harness1.policy.policy import Decision
from harness1.records import TAGS, Task, ToolCall
from harness1.tools.end_search import END_SEARCH
from harness1.tools.tool import ToolSpec

REPEATS = 10
"""Number of searches of the query repeater."""
ROUNDS = 2
"""Number of times that the tool spammer uses each tool."""
REVISION = 1
"""Increased whenever one of the rules decides differently."""

END = ToolCall(END_SEARCH, {"reasoning": "This policy does no more."})
Rule = Callable[[int, Context], ToolCall]
"""Returns the action of a turn, counted from 0."""


def no_op(turn: int, context: Context) -> ToolCall:
    """End at once, with nothing."""
    return END


def stop_at_once(turn: int, context: Context) -> ToolCall:
    """Search for the unchanged question, and deliver whatever that search put in the set."""
    return search_call(context.view.query) if turn == 0 else END


def curate_everything(turn: int, context: Context) -> ToolCall:
    """Search for the question page by page, and curate every hit until the set is full."""
    view = context.view
    if len(view.curated) >= view.cap or is_late(view) or (turn > 1 and turn % 2 == 1 and not view.hits.get(turn)):
        return END if turn else search_call(view.query)
    return _curate(_newest(view)) if turn % 2 else search_call(view.query)


def query_repeater(turn: int, context: Context) -> ToolCall:
    """Repeat the same search, and curate nothing."""
    return search_call(context.view.query) if turn < REPEATS else END


def tool_spammer(turn: int, context: Context) -> ToolCall:
    """Use each tool in turn, on single words of the question and the last documents; curate all that is visible."""
    specs = [spec for spec in context.tools if spec.name != END_SEARCH]
    if turn >= ROUNDS * len(specs):
        return END
    words = context.view.query.split() or ["the"]
    return _spam(specs[turn % len(specs)], words[turn % len(words)], context.view)


def id_inventor(turn: int, context: Context) -> ToolCall:
    """Curate invented ids, and documents whose ids occur in the question. It searches once, since only found documents
    can be curated, but ignores the results, and finally removes all other documents."""
    view = context.view
    if turn == 0:
        return _curate([f"D{number}" for number in range(1, 6)] + [f"doc_{number}" for number in range(5)])
    if turn == 1:
        return search_call(view.query)
    named = [document.handle for document in view.documents.values() if _stands_in(document.unit_id, view.query)]
    others = [entry.handle for entry in view.curated if entry.handle not in named]
    if turn > 2 or not (named or others):
        return END
    return ToolCall("curate", {"add_ids": named, "remove_ids": others})


class ReflexPolicy:
    """A policy that follows a fixed rule of the turn number and the context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hash = digest(["degenerate", name, REVISION])

    def open(self, task: Task, seed: int) -> RuleSession:
        rule = RULES[self.name]
        return RuleSession(lambda turn, context: Decision((rule(turn, context),), "This policy does not think."))


class RuleSession:
    """One episode of a policy that decides by the number of the turn, counted from 0, and the context alone."""

    def __init__(self, rule: Callable[[int, Context], Decision], turn: int = 0) -> None:
        self._rule, self._turn = rule, turn

    async def act(self, context: Context) -> Decision:
        self._turn += 1
        return self._rule(self._turn - 1, context)

    def fork(self) -> RuleSession:
        return RuleSession(self._rule, self._turn)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.__name__.replace("_", "-"): rule
        for rule in (no_op, stop_at_once, curate_everything, query_repeater, tool_spammer, id_inventor)
    }
)
"""The rules by policy name."""


def _curate(handles: Sequence[str]) -> ToolCall:
    return ToolCall("curate", {"add_ids": list(handles)})


def _newest(view: View) -> list[str]:
    """Return the documents of the last turn that showed hits."""
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


END_PROBABILITY = 0.1


class RandomPolicy:
    """A policy that draws a sensible action, with arguments drawn from what is visible."""

    name = "random"
    hash = digest(["random", END_PROBABILITY])

    def open(self, task: Task, seed: int) -> RandomSession:
        return RandomSession(random.Random(f"{seed}/{task.task_id}"))


class RandomSession:
    """One episode; every choice comes from its own generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def act(self, context: Context) -> Decision:
        view = context.view
        if view.documents and self._rng.random() < END_PROBABILITY:
            return Decision((ToolCall(END_SEARCH, {"reasoning": "A random end."}),))
        names = sorted(spec.name for spec in context.tools if spec.name != END_SEARCH)
        if not view.documents:
            names = [name for name in names if name in ("search_corpus", "fan_out_search")]
        name = self._rng.choice(names)
        return Decision((ToolCall(name, self._arguments(name, view, context.tools)),), "A random action.")

    def fork(self) -> RandomSession:
        return RandomSession(copy.copy(self._rng))

    def _arguments(self, name: str, view: View, tools: Sequence[ToolSpec]) -> dict[str, Any]:
        match name:
            case "search_corpus":
                return {"query": self._words(view)}
            case "fan_out_search":
                return {"queries": [self._words(view) for _ in range(self._rng.randint(1, 5))]}
            case "grep_corpus":
                return {"pattern": self._words(view).split()[0]}
            case "read_document":
                return {"doc_id": self._handles(view, 1)[0]}
            case "curate":
                handles = self._handles(view, 5)
                tags = {handle: self._rng.choice(TAGS) for handle in handles}
                return curate_call(tools, tags).arguments
            case "verify":
                return {"doc_ids": self._handles(view, 3), "claim": view.query}
            case _:
                return {"doc_ids": self._handles(view, 3)}

    def _words(self, view: View) -> str:
        """Return a few words of the question or a visible title; if entities have handles, one, and a word or none."""
        if view.entities:
            word = self._rng.choice(["", *(word for word in view.query.split() if word.isalpha() and word.islower())])
            return f"{self._rng.choice(list(view.entities))} {word}".strip()
        titles = [document.title for document in view.documents.values() if document.title]
        words = self._rng.choice([view.query, *titles]).split() or ["the"]
        count = min(len(words), self._rng.randint(2, 8))
        return " ".join(self._rng.sample(words, count))

    def _handles(self, view: View, most: int) -> list[str]:
        known = sorted(view.documents)
        return self._rng.sample(known, min(len(known), self._rng.randint(1, most)))


TOP = 30


class SingleShotPolicy:
    """A policy that searches once, curates the hits best first (at most `TOP`: set `env.search.hits=30`) and ends.

    Its set is delivered as any other: in the order of the harness's evidence, or with `env.evidence.rank=false` in that
    of the ranking, whose top the first search populates.
    """

    name = "single-shot"
    hash = digest(["single-shot", TOP])

    def open(self, task: Task, seed: int) -> RuleSession:
        return RuleSession(_single_shot)


def _single_shot(turn: int, context: Context) -> Decision:
    view = context.view
    if turn == 0:
        return Decision((search_call(view.query),), "Search for the question as it stands.")
    found = [hit.document.handle for hit in view.hits.get(1, [])][:TOP]
    if turn == 1 and found:
        return Decision((_curate(found),), "Keep the ranking as it is.")
    return Decision((ToolCall(END_SEARCH, {"reasoning": "One search is all that this policy does."}),))
