"""Policies around other policies: written in a student's format, stripped of reasons, asked for reasons, or mixed."""

from __future__ import annotations

import copy
import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from harness1.env.environment import choose
from harness1.env.pieces import action_piece, counter_of
from harness1.env.render import Context
from harness1.models.chat_format import ChatFormat
from harness1.plain import digest, utf8_safe
from harness1.policy.policy import Decision, Policy, Session
from harness1.records import ModelCall, Task, ToolCall, json_safe_call
from harness1.tools.tool import ToolSpec


class MixedPolicy:
    """Two policies without a tokenizer, the first with a share of the turns: a teacher with room to improve."""

    def __init__(self, first: Policy, second: Policy, share: float) -> None:
        self._parts = (first, share), (second, 1.0 - share)
        self.name = "+".join(f"{share:g}*{policy.name}" for policy, share in self._parts)
        self.hash = digest(["mixed", [[policy.hash, share] for policy, share in self._parts]])

    def open(self, task: Task, seed: int) -> MixedSession:
        sessions = [policy.open(task, seed) for policy, _ in self._parts]
        shares = [share for _, share in self._parts]
        return MixedSession(sessions, shares, random.Random(f"mixed/{seed}/{task.task_id}"))


class MixedSession:
    """One episode; its own generator draws the policy of each turn."""

    def __init__(self, sessions: Sequence[Session], shares: Sequence[float], rng: random.Random) -> None:
        self._sessions, self._shares, self._rng = tuple(sessions), shares, rng

    async def act(self, context: Context) -> Decision:
        (chosen,) = self._rng.choices(self._sessions, self._shares)
        return await chosen.act(context)

    def fork(self) -> MixedSession:
        return MixedSession([session.fork() for session in self._sessions], self._shares, copy.copy(self._rng))


class WrappedPolicy(ABC):
    """A policy whose contexts or decisions are changed on their way in and out."""

    def __init__(self, policy: Policy, name: str, kind: str, *settings: object) -> None:
        self.policy, self.name = policy, name
        self.hash = digest([kind, policy.hash, *settings])

    def open(self, task: Task, seed: int) -> WrappedSession:
        return WrappedSession(self, self.policy.open(task, seed))

    def wrap_context(self, context: Context) -> Context:
        """Return the context as the wrapped policy sees it."""
        return context

    @abstractmethod
    def wrap_decision(self, decision: Decision, context: Context) -> Decision:
        """Return a decision with actions as it leaves this policy."""

    def wrap_failure(self, decision: Decision) -> Decision:
        """Return a decision without actions as it leaves this policy."""
        return decision


class WrappedSession:
    """One episode of a wrapped policy."""

    def __init__(self, wrapper: WrappedPolicy, session: Session) -> None:
        self._wrapper, self._session = wrapper, session

    @property
    def pending(self) -> Decision | None:
        cut: Decision | None = getattr(self._session, "pending", None)
        return None if cut is None else self._wrapper.wrap_failure(cut)

    async def act(self, context: Context) -> Decision:
        decision = await self._session.act(self._wrapper.wrap_context(context))
        if not decision.actions:
            return self._wrapper.wrap_failure(decision)
        return self._wrapper.wrap_decision(decision, context)

    def fork(self) -> WrappedSession:
        return WrappedSession(self._wrapper, self._session.fork())


REASONING = "reasoning"
IMPORTANCE = "importance"
ASKED = {
    "type": "string",
    "description": "In one or two sentences: what is known, what is missing, and why this action is the next one.",
}


class ReasonedPolicy(WrappedPolicy):
    """A policy that must give a reason with every call, and a tag with every document. The reason becomes the
    reasoning, and leaves the call; where a model leaves it out, its text beside the call is kept."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, policy.name, "reasoned", ASKED)
        self.counter = counter_of(policy)

    def wrap_context(self, context: Context) -> Context:
        return dataclasses.replace(context, tools=tuple(map(ask_for_reason, context.tools)))

    def wrap_decision(self, decision: Decision, context: Context) -> Decision:
        """Remove the reasons from the calls, and use that of the executed call."""
        known = {spec.name for spec in context.tools if REASONING in spec.parameters["properties"]}
        given = choose(decision.actions)[0].arguments.get(REASONING)
        reason = given.strip() if isinstance(given, str) else ""
        actions = tuple(action if action.name in known else _without_reason(action) for action in decision.actions)
        return msgspec.structs.replace(decision, actions=actions, reasoning=reason or decision.reasoning)


def ask_for_reason(spec: ToolSpec) -> ToolSpec:
    """Return a tool as shown to the model: the reason is its first argument, thought of before the others."""
    parameters = spec.parameters
    properties: dict[str, Any] = {REASONING: ASKED} | parameters["properties"]
    demanded = (REASONING, *parameters["required"], *(name for name in properties if name == IMPORTANCE))
    changed = {"properties": properties, "required": list(dict.fromkeys(demanded))}
    return msgspec.structs.replace(spec, parameters=parameters | changed)


def _without_reason(action: ToolCall) -> ToolCall:
    return ToolCall(action.name, {name: value for name, value in action.arguments.items() if name != REASONING})


class SilentPolicy(WrappedPolicy):
    """A policy without a tokenizer, whose decisions lose their reasoning and the reason arguments of their calls."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, f"silent:{policy.name}", "silent")

    def wrap_decision(self, decision: Decision, context: Context) -> Decision:
        return msgspec.structs.replace(decision, actions=tuple(map(_without_reason, decision.actions)), reasoning="")

    def wrap_failure(self, decision: Decision) -> Decision:
        return msgspec.structs.replace(decision, reasoning="")


class StudentFormatPolicy(WrappedPolicy):
    """A policy whose decisions are written in a chat format, without log probabilities: nothing was sampled. Calls and
    earlier outputs of a policy that is a model itself are dropped: they are in another vocabulary."""

    def __init__(self, policy: Policy, chat: ChatFormat) -> None:
        super().__init__(policy, policy.name, "spoken", chat.hash)
        self.counter = chat

    def wrap_context(self, context: Context) -> Context:
        """Return the context without token ids, which are not of the policy's vocabulary."""
        pieces = list(context.pieces)
        for place, each in enumerate(pieces):
            if each.call is not None and each.turn_ref is not None:
                pieces[place] = action_piece(each.turn_ref, each.text, each.shows, None)
        return dataclasses.replace(context, pieces=tuple(pieces))

    def wrap_decision(self, decision: Decision, context: Context) -> Decision:
        """Write the executed action as a call of the student."""
        chat = self.counter
        action, _ = choose(decision.actions)
        prompt = [*chat.segments(context), chat.prompt_end()]
        call = ModelCall(
            call_id=f"{context.turn}.0",
            prompt=tuple(segment.key for segment in prompt),
            output_ids=chat.format_action(utf8_safe(decision.reasoning), json_safe_call(action)),
            tokenizer_hash=chat.tokenizer.hash,
            finish_reason="stop",
        )
        segments = {key: ids for key, ids in prompt if not key.startswith("call/")}
        return msgspec.structs.replace(decision, actions=(action,), calls=(call,), segments=segments)

    def wrap_failure(self, decision: Decision) -> Decision:
        """Drop the calls and their segments, which would be counted as this vocabulary's."""
        return msgspec.structs.replace(decision, calls=(), segments={})


def in_student_format(policy: Policy, chat: ChatFormat) -> Policy:
    """Wrap a policy to write a chat format, unless it is a model with exactly this format and tokenizer."""
    return policy if counter_of(policy).hash == chat.hash else StudentFormatPolicy(policy, chat)
