"""A policy that takes random legal actions: the floor that everything else must clear."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from harness1.env.render import Context
from harness1.env.view import View
from harness1.hashing import digest
from harness1.policy.actions import curate_call
from harness1.policy.policy import Decision
from harness1.records import TAGS, Task, ToolCall
from harness1.tools.end_search import END_SEARCH
from harness1.tools.tool import ToolSpec

END_PROBABILITY = 0.1


class RandomPolicy:
    """Draws an action from those that make sense now, with arguments drawn from what is visible."""

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
        twin = random.Random()
        twin.setstate(self._rng.getstate())
        return RandomSession(twin)

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
        """A few words of the question or of a visible title; where entities have handles, one with a word or none."""
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
