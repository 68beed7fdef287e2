"""A policy that delivers the shortest documents of one search."""

from __future__ import annotations

import re

from harness1.config import Config
from harness1.env.render import Context
from harness1.errors import UsageError
from harness1.plain import digest
from harness1.policy.policy import Decision, Session
from harness1.policy.scripted import curate_call, search_call
from harness1.records import Tag, Task, ToolCall
from harness1.tools.documents import END_SEARCH

COUNT = "count_words"


class Shortest:
    """Searches the question, counts the words of what it found, and delivers the shortest documents."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = f"shortest:{size}"
        self.hash = digest(["shortest", size])

    def open(self, task: Task, seed: int) -> Session:
        return self

    async def act(self, context: Context) -> Decision:
        """Decide by the turns before: an episode has no other state."""
        view = context.view
        tools = [turn.tool for turn in view.turns.values()]
        if not tools:
            return Decision((search_call(view.query),), "See what there is.")
        if tools == ["search_corpus"] and view.documents:
            return Decision((ToolCall(COUNT, {"doc_ids": list(view.documents)}),), "How long are they?")
        if tools[-1] == COUNT:
            notes = [note.data["text"] for note in list(view.turns.values())[-1].notes if note.code == "said"]
            counts = sorted((int(words), handle) for handle, words in re.findall(r"(D\d+) (\d+)", notes[0]))
            best: dict[str, Tag] = {handle: "fair" for _, handle in counts[: self.size]}
            drop = [entry.handle for entry in view.curated if entry.handle not in best]
            return Decision((curate_call(context.tools, best, drop),), "Keep the shortest.")
        return Decision((ToolCall(END_SEARCH, {"reasoning": "The shortest are curated."}),))

    def fork(self) -> Session:
        return self


def open_shortest(argument: str, config: Config) -> Shortest:
    """Open the policy by `shortest` or `shortest:SIZE`; raise UsageError if it cannot count words."""
    if COUNT not in config.env.plugins:
        raise UsageError(f"the policy shortest needs its tool: --set 'env.plugins=[\"{COUNT}\"]'")
    if argument and not argument.isdecimal():
        raise UsageError(f"shortest:{argument} has no size: write shortest:3")
    return Shortest(int(argument or "3"))
