"""A hosted model asked for its reasons: every tool gets a required argument for them, as the published teacher had.

Source: Harness-1 (arXiv 2606.02373), on the generation of trajectories for supervised fine-tuning.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from harness1.env.environment import choose
from harness1.env.render import Context
from harness1.hashing import digest
from harness1.policy.policy import Decision, Policy, Session
from harness1.records import Task, ToolCall
from harness1.tools.tool import ToolSpec

REASONING = "reasoning"
IMPORTANCE = "importance"
ASKED = {
    "type": "string",
    "description": "In one or two sentences: what is known, what is missing, and why this action is the next one.",
}


class ReasonedPolicy:
    """A policy that must give a reason with every call, and a tag with every document that it curates.

    The reason becomes the reasoning of the decision; the environment, whose tools know no such argument, gets the
    call without it. A model that leaves it out is not asked again: what it said beside its call stands.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name = policy, policy.name
        self.hash = digest(["reasoned", policy.hash, ASKED])

    def open(self, task: Task, seed: int) -> ReasonedSession:
        return ReasonedSession(self.policy.open(task, seed))


class ReasonedSession:
    """One episode of it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def pending(self) -> Decision | None:
        cut: Decision | None = getattr(self._session, "pending", None)
        return cut

    async def act(self, context: Context) -> Decision:
        decision = await self._session.act(dataclasses.replace(context, tools=tuple(map(asking, context.tools))))
        if not decision.actions:
            return decision
        known = {spec.name for spec in context.tools if REASONING in spec.parameters["properties"]}
        executed, _ = choose(decision.actions)
        actions = tuple(action if action.name in known else _bare(action) for action in decision.actions)
        return msgspec.structs.replace(decision, actions=actions, reasoning=_reason(executed) or decision.reasoning)

    def fork(self) -> ReasonedSession:
        return ReasonedSession(self._session.fork())


def asking(spec: ToolSpec) -> ToolSpec:
    """A tool as the model is shown it: the reason is its first argument, so that it is thought of before the rest."""
    parameters = spec.parameters
    properties: dict[str, Any] = {REASONING: ASKED} | parameters["properties"]
    demanded = (REASONING, *parameters["required"], *(name for name in properties if name == IMPORTANCE))
    changed = {"properties": properties, "required": list(dict.fromkeys(demanded))}
    return msgspec.structs.replace(spec, parameters=parameters | changed)


def _reason(action: ToolCall) -> str:
    given = action.arguments.get(REASONING)
    return given.strip() if isinstance(given, str) else ""


def _bare(action: ToolCall) -> ToolCall:
    return ToolCall(action.name, {name: value for name, value in action.arguments.items() if name != REASONING})
