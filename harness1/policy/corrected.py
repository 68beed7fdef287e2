"""A student that begins an episode, and a teacher that ends it: right choices where the student's mistakes lead."""

from __future__ import annotations

import random

from harness1.env.render.context import Context
from harness1.hashing import digest
from harness1.policy.language_model import LanguageModelPolicy, LanguageModelSession
from harness1.policy.policy import Decision
from harness1.policy.teacher.lead_teacher import LeadTeacher, LeadTeacherSession
from harness1.policy.wrappers import SilentPolicy, StudentFormatPolicy
from harness1.records import Task

UNBOUNDED = 8
"""Turns among which the handover is drawn if the environment shows no bound."""


class CorrectedPolicy:
    """The student takes the first turns, and the teacher all others. A student that learns from a teacher alone never
    sees what follows from its own mistakes (DAgger: Ross, Gordon and Bagnell, arXiv 1011.0686).

    The number of the student's turns, at least one, is drawn evenly for each episode. Where its output holds no call,
    the teacher takes over at once, and that output is not recorded. The teacher gives no reasons and writes the
    student's format; its calls have no log probabilities, which tells them from the student's.
    """

    def __init__(self, student: LanguageModelPolicy, teacher: LeadTeacher) -> None:
        self.student, self.teacher, self.counter = student, teacher, student.counter
        self.written = (SilentPolicy(teacher), StudentFormatPolicy(teacher, student.counter))
        self.name = f"corrected:{student.name}"
        self.hash = digest(["corrected", student.hash, teacher.hash, UNBOUNDED])

    def open(self, task: Task, seed: int) -> CorrectedSession:
        draw = random.Random(f"corrected/{seed}/{task.task_id}").random()
        return CorrectedSession(self, self.student.open(task, seed), self.teacher.open(task, seed), draw)


class CorrectedSession:
    """One episode; `draw`, in [0, 1), decides when the teacher takes over."""

    def __init__(
        self, policy: CorrectedPolicy, student: LanguageModelSession, teacher: LeadTeacherSession, draw: float
    ) -> None:
        self._policy, self._student, self._teacher, self._draw = policy, student, teacher, draw
        self._last = 0
        """The last turn that is the student's, once the first context has shown how many there are."""

    @property
    def pending(self) -> Decision | None:
        return self._student.pending

    async def act(self, context: Context) -> Decision:
        if context.turn == 1:
            left = context.view.budget.turns_left()
            self._last = 1 + int(self._draw * max(1, (UNBOUNDED if left is None else left) - 1))
        if context.turn <= self._last:
            decision = await self._student.act(context)
            if decision.actions:
                self._teacher.watch(context)
                return decision
            self._last = 0
        decision = await self._teacher.act(context)
        for wrapper in self._policy.written:
            decision = wrapper.decided(decision, context)
        return decision

    def fork(self) -> CorrectedSession:
        twin = CorrectedSession(self._policy, self._student.fork(), self._teacher.fork(), self._draw)
        twin._last = self._last
        return twin
