"""Several policies in one episode: each turn is taken by one of them, drawn by its share."""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness1.env.render import Context
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.policy.policy import Decision, Policy, Session
from harness1.records import Task


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
