"""Any policy made to speak a chat format: its episodes hold the tokens that a model would have said.

A teacher without a model thereby acts in the very context that its student will see, counted by the student's
tokenizer, and a training row is cut out of the record without rendering anything again.
"""

from __future__ import annotations

import msgspec

from harness1.env.environment import choose
from harness1.env.render import Context
from harness1.hashing import digest
from harness1.policy.formats.chat_format import ChatFormat
from harness1.policy.policy import Decision, Policy, Session
from harness1.records import ModelCall, Task


class SpokenPolicy:
    """A policy whose decisions are written in a format. They have no log probabilities: nothing was sampled."""

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

    async def act(self, context: Context) -> Decision:
        decision = await self._session.act(context)
        if not decision.actions:
            return decision
        prompt = [*self._chat.segments(context), self._chat.prompt_end()]
        action, _ = choose(decision.actions)
        call = ModelCall(
            call_id=f"{context.turn}.0",
            prompt=tuple(segment.key for segment in prompt),
            output_ids=self._chat.speak(decision.reasoning, action),
            tokenizer_hash=self._chat.tokenizer.hash,
            finish_reason="stop",
        )
        segments = {key: ids for key, ids in prompt if not key.startswith("call/")}
        return msgspec.structs.replace(decision, actions=(action,), calls=(call,), segments=segments)

    def fork(self) -> SpokenSession:
        return SpokenSession(self._session.fork(), self._chat)
