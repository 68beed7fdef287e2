"""The protocol of a policy (design section 5)."""

from __future__ import annotations

from typing import Protocol

from harness1.env.render.context import Context
from harness1.env.render.pieces import ApproximateCounter, TokenCounter
from harness1.records import ModelCall, Record, Task, ToolCall


class Decision(Record):
    """What a policy decided at one turn: its actions in the order emitted, or why there is none.

    More than one action is allowed to be emitted, and only one is carried out. `calls` holds every model call behind
    the decision, failed attempts included.
    """

    actions: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    calls: tuple[ModelCall, ...] = ()
    parse_error: str | None = None
    segments: dict[str, tuple[int, ...]] = {}
    """Token ids of the stretches that the prompts of `calls` name, but for the outputs of earlier calls."""


class Session(Protocol):
    """A policy at work on one episode.

    One that may fail within a turn, after calls that cost something, has them in `pending`: a `Decision` without
    actions while `act` is under way, else None. An episode that a fault ends records them.
    """

    async def act(self, context: Context) -> Decision: ...

    def fork(self) -> Session:
        """A second session that goes on from here; neither sees what the other does."""
        ...


class Policy(Protocol):
    """Opens sessions; `hash` names everything that decides its behaviour, `name` is what a user typed.

    A policy with a tokenizer has a `counter`, too, by which its environment reckons (`counter_of`).
    """

    @property
    def name(self) -> str: ...

    @property
    def hash(self) -> str: ...

    def open(self, task: Task, seed: int) -> Session: ...


def counter_of(policy: Policy) -> TokenCounter:
    """How an environment counts tokens for a policy: as its format does, or approximately where it has none."""
    counter: TokenCounter | None = getattr(policy, "counter", None)
    return counter or ApproximateCounter()
