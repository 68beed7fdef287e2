"""A policy that gives no reasons: for students too small to learn words that decide nothing."""

from __future__ import annotations

import msgspec

from harness1.env.render import Context
from harness1.hashing import digest
from harness1.policy.policy import Decision, Policy, Session
from harness1.records import Task, ToolCall

REASON = "reasoning"


class SilentPolicy:
    """The decisions of a policy, without reasoning and without the argument in which a call gives its reason.

    Args:
        policy: one without a tokenizer of its own.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = f"silent:{policy.name}"
        self.hash = digest(["silent", policy.hash])

    def open(self, task: Task, seed: int) -> SilentSession:
        return SilentSession(self._policy.open(task, seed))


class SilentSession:
    """One episode of it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def act(self, context: Context) -> Decision:
        decision = await self._session.act(context)
        actions = tuple(_bare(action) for action in decision.actions)
        return msgspec.structs.replace(decision, actions=actions, reasoning="")

    def fork(self) -> SilentSession:
        return SilentSession(self._session.fork())


def _bare(action: ToolCall) -> ToolCall:
    return ToolCall(action.name, {name: value for name, value in action.arguments.items() if name != REASON})
