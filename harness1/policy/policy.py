"""The protocol of a policy."""

from __future__ import annotations

import copy
from typing import Protocol, Self

from harness1.env.render import Context
from harness1.records import ModelCall, Record, Task, ToolCall


class Decision(Record):
    """The policy's decision at one turn: its actions in the order emitted, of which only one is carried out, or the
    reason why there is none. `calls` holds every model call behind the decision, failed attempts included."""

    actions: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    calls: tuple[ModelCall, ...] = ()
    parse_error: str | None = None
    segments: dict[str, tuple[int, ...]] = {}
    """Token ids of the segments in the prompts of `calls`, except for the outputs of earlier calls."""


class Session(Protocol):
    """A policy at work on one episode. One that may fail within a turn, after calls that cost something, keeps these in
    `pending`: a `Decision` without actions while `act` is running, else None. A fault records them."""

    async def act(self, context: Context) -> Decision: ...

    def fork(self) -> Session:
        """Return a second session that continues from here; neither sees what the other does."""


class CopiedSession:
    """A session that holds plain values alone: a fork is a copy."""

    def fork(self) -> Self:
        return copy.deepcopy(self)


class Policy(Protocol):
    """Opens sessions. `hash` identifies everything that decides its behaviour, `name` is what a user typed. A policy
    with a tokenizer also has a `counter`, by which its environment counts tokens (`counter_of`)."""

    @property
    def name(self) -> str: ...

    @property
    def hash(self) -> str: ...

    def open(self, task: Task, seed: int) -> Session: ...
