"""Policies around others: rendered in a chat format, without reasons, asked for reasons, and several taking turns."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from harness1.env.environment import choose
from harness1.env.render.context import Context
from harness1.env.render.pieces import Piece, action_piece
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.models.formats.chat_format import ChatFormat
from harness1.plain import json_safe_call, utf8_safe
from harness1.policy.policy import Decision, Policy, Session, counter_of
from harness1.records import ModelCall, Task, ToolCall
from harness1.tools.tool import ToolSpec


class MixedPolicy:
    """A mediocre teacher: who imitates it takes good and bad actions by their shares, and has something left to learn.

    Only the policy that takes a turn is asked; the others find what it did in the next context.

    Args:
        policies: without a tokenizer of their own.
        shares: of the turns, one for each policy, in any unit.

    Raises:
        UsageError: there is no share for each policy, one is negative or all are 0.
    """

    def __init__(self, policies: Sequence[Policy], shares: Sequence[float]) -> None:
        if len(policies) != len(shares) or min(shares, default=0.0) < 0 or sum(shares) <= 0:
            raise UsageError(f"{len(policies)} policies need as many shares, none negative and one above 0")
        self._policies, self._shares = tuple(policies), tuple(shares)
        self.name = "+".join(f"{share:g}*{each.name}" for each, share in zip(policies, shares, strict=True))
        self.hash = digest(["mixed", [[each.hash, share] for each, share in zip(policies, shares, strict=True)]])

    def open(self, task: Task, seed: int) -> MixedSession:
        sessions = [policy.open(task, seed) for policy in self._policies]
        return MixedSession(sessions, self._shares, random.Random(f"mixed/{seed}/{task.task_id}"))


class MixedSession:
    """One episode; who is next comes from its own generator."""

    def __init__(self, sessions: Sequence[Session], shares: Sequence[float], rng: random.Random) -> None:
        self._sessions, self._shares, self._rng = tuple(sessions), shares, rng

    async def act(self, context: Context) -> Decision:
        (chosen,) = self._rng.choices(self._sessions, self._shares)
        return await chosen.act(context)

    def fork(self) -> MixedSession:
        twin = random.Random()
        twin.setstate(self._rng.getstate())
        return MixedSession([session.fork() for session in self._sessions], self._shares, twin)


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
        actions = tuple(_without_reason(action) for action in decision.actions)
        return msgspec.structs.replace(decision, actions=actions, reasoning="")

    def fork(self) -> SilentSession:
        return SilentSession(self._session.fork())


def _without_reason(action: ToolCall) -> ToolCall:
    return ToolCall(action.name, {name: value for name, value in action.arguments.items() if name != REASON})


class StudentFormatPolicy:
    """A policy whose decisions are written in a format. They have no log probabilities: nothing was sampled.

    Of a policy that is a language model itself, the calls are not kept, nor how they were sampled and what failed
    attempts there were: they are in another vocabulary. It sees its earlier outputs as plain words for the same reason,
    and it is the student's tokenizer, not its own, by which contexts are made to fit.
    """

    def __init__(self, policy: Policy, chat: ChatFormat) -> None:
        self.policy, self.counter = policy, chat
        self.name = policy.name
        self.hash = digest(["spoken", policy.hash, chat.hash])

    def open(self, task: Task, seed: int) -> StudentFormatSession:
        return StudentFormatSession(self.policy.open(task, seed), self.counter)


class StudentFormatSession:
    """One episode of it."""

    def __init__(self, session: Session, chat: ChatFormat) -> None:
        self._session, self._chat = session, chat

    @property
    def pending(self) -> Decision | None:
        """As of every session, without calls: none of them is in this vocabulary."""
        cut: Decision | None = getattr(self._session, "pending", None)
        return None if cut is None else _without_calls(cut)

    async def act(self, context: Context) -> Decision:
        decision = await self._session.act(_in_words(context))
        if not decision.actions:
            return _without_calls(decision)
        chat = self._chat
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

    def fork(self) -> StudentFormatSession:
        return StudentFormatSession(self._session.fork(), self._chat)


def in_student_format(policy: Policy, chat: ChatFormat) -> Policy:
    """A policy that speaks a format: the policy itself, if it is a model of this very format and tokenizer."""
    return policy if counter_of(policy).hash == chat.hash else StudentFormatPolicy(policy, chat)


def _without_calls(decision: Decision) -> Decision:
    """A decision that came to no action. Segments of another vocabulary would be taken for counts of this one."""
    return msgspec.structs.replace(decision, calls=(), segments={})


def _in_words(context: Context) -> Context:
    """The context as a policy of another vocabulary may see it: no piece has ids of this one."""
    return dataclasses.replace(context, pieces=tuple(map(_worded, context.pieces)))


def _worded(piece: Piece) -> Piece:
    if piece.call is None or piece.turn_ref is None:
        return piece
    return action_piece(piece.turn_ref, piece.text, piece.shows, None)
