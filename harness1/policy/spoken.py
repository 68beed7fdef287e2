"""Any policy made to speak a chat format: its episodes hold the tokens that a model would have said.

A teacher without a model thereby acts in the very context that its student will see, counted by the student's
tokenizer, and a training row is cut out of the record without rendering anything again.
"""

from __future__ import annotations

import dataclasses

import msgspec

from harness1.env.environment import choose
from harness1.env.pieces import Piece, action_piece
from harness1.env.render import Context
from harness1.hashing import digest
from harness1.plain import plain_call, plain_text
from harness1.policy.formats.chat_format import ChatFormat
from harness1.policy.policy import Decision, Policy, Session, counter_of
from harness1.records import ModelCall, Task


class SpokenPolicy:
    """A policy whose decisions are written in a format. They have no log probabilities: nothing was sampled.

    Of a policy that is a language model itself, the calls are not kept, nor how they were sampled and what failed
    attempts there were: they are in another vocabulary. It sees its earlier outputs as plain words for the same reason,
    and it is the student's tokenizer, not its own, by which contexts are made to fit.
    """

    def __init__(self, policy: Policy, chat: ChatFormat) -> None:
        self.policy, self.counter = policy, chat
        self.name = policy.name
        self.hash = digest(["spoken", policy.hash, chat.hash])

    def open(self, task: Task, seed: int) -> SpokenSession:
        return SpokenSession(self.policy.open(task, seed), self.counter)


class SpokenSession:
    """One episode of it."""

    def __init__(self, session: Session, chat: ChatFormat) -> None:
        self._session, self._chat = session, chat

    @property
    def pending(self) -> Decision | None:
        """As of every session, without calls: none of them is in this vocabulary."""
        cut: Decision | None = getattr(self._session, "pending", None)
        return None if cut is None else _unspoken(cut)

    async def act(self, context: Context) -> Decision:
        decision = await self._session.act(_in_words(context))
        if not decision.actions:
            return _unspoken(decision)
        chat = self._chat
        action, _ = choose(decision.actions)
        prompt = [*chat.segments(context), chat.prompt_end()]
        call = ModelCall(
            call_id=f"{context.turn}.0",
            prompt=tuple(segment.key for segment in prompt),
            output_ids=chat.speak(plain_text(decision.reasoning), plain_call(action)),
            tokenizer_hash=chat.tokenizer.hash,
            finish_reason="stop",
        )
        segments = {key: ids for key, ids in prompt if not key.startswith("call/")}
        return msgspec.structs.replace(decision, actions=(action,), calls=(call,), segments=segments)

    def fork(self) -> SpokenSession:
        return SpokenSession(self._session.fork(), self._chat)


def speaking(policy: Policy, chat: ChatFormat) -> Policy:
    """A policy that speaks a format: the policy itself, if it is a model of this very format and tokenizer."""
    return policy if counter_of(policy).hash == chat.hash else SpokenPolicy(policy, chat)


def _unspoken(decision: Decision) -> Decision:
    """A decision that came to no action. Segments of another vocabulary would be taken for counts of this one."""
    return msgspec.structs.replace(decision, calls=(), segments={})


def _in_words(context: Context) -> Context:
    """The context as a policy of another vocabulary may see it: no piece has ids of this one."""
    return dataclasses.replace(context, pieces=tuple(map(_worded, context.pieces)))


def _worded(piece: Piece) -> Piece:
    if piece.spoken is None or piece.turn_ref is None:
        return piece
    return action_piece(piece.turn_ref, piece.text, piece.shows, None)
