"""A teacher whose choices a student can make too: it searches what the harness offers, and knows the gold only to
select and to stop."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping

from harness1.env.render import Context
from harness1.env.view import View
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.policy.oracle import wanted
from harness1.policy.policy import Decision
from harness1.policy.scripted import FAN_OUT, curate_call, search_call
from harness1.policy.teacher.evidence import SeenEvidence
from harness1.records import Gold, Task, ToolCall, UnitId
from harness1.tools.documents import END_SEARCH

FOLLOWED = 2
"""Most searches of an episode that follow leads."""
GUESSES = 2
"""Fewest documents delivered while gold is missing: the best by evidence."""
REVISION = 4
"""Increased whenever the teacher decides differently."""
DELIVERY = 1
"""Turns that the last curation needs."""
FALLOFF = 0.6
"""Each further lead is chosen this many times as often as the one before it."""
KEPT = 0.75
"""Share of the leads that an episode which draws them follows, where several are followed at once."""


class LeadTeacher:
    """Search the question; follow leads while gold is missing; edit the curated set to what was found; end.

    Where one call can search several leads, it follows all that are shown at once, and the first time even if nothing
    is missing: a student cannot tell whether something is, and what they bring costs it little. The first episode of a
    task follows the first leads, its others draw them, so that the best of several shows which lead was worth it. It
    needs `env.evidence.rank` and `env.leads.on`.

    Raises:
        UsageError: on opening, if the task's gold was not given.
    """

    name = "lead-teacher"
    hash = digest([name, FOLLOWED, GUESSES, FALLOFF, KEPT, REVISION])

    def __init__(self, golds: Mapping[str, Gold]) -> None:
        self._golds = golds

    def open(self, task: Task, seed: int) -> LeadTeacherSession:
        if task.task_id not in self._golds:
            raise UsageError(f"the lead teacher needs the gold of task {task.task_id}")
        return LeadTeacherSession(wanted(self._golds[task.task_id]), random.Random(f"{task.task_id}/{seed}"))


class LeadTeacherSession:
    """One episode. It remembers what it saw and followed, and reads everything else from the view."""

    def __init__(self, needs: tuple[frozenset[UnitId], ...], rng: random.Random) -> None:
        self._needs, self._rng = needs, rng
        self._draws = rng.random() < FALLOFF
        self._evidence: SeenEvidence | None = None
        self._followed: set[str] = set()
        self._searches: set[int] = set()
        """The turns that searched."""

    async def act(self, context: Context) -> Decision:
        return Decision((self._next(context, context.view, self._watch(context)),), "The gold decides.")

    def _watch(self, context: Context) -> SeenEvidence:
        """Return what was seen so far, this turn included."""
        if self._evidence is None:
            self._evidence = SeenEvidence(context.view.query, self._needs)
        self._evidence.read(context.view)
        self._searches.update(turn.turn for turn in context.view.turns.values() if turn.queries)
        return self._evidence

    def fork(self) -> LeadTeacherSession:
        return copy.deepcopy(self)

    def _next(self, context: Context, view: View, evidence: SeenEvidence) -> ToolCall:
        if not evidence.documents and not self._searches:
            self._searches.add(context.turn)
            return search_call(view.handle or view.query)
        left = view.budget.turns_left()
        at_once = any(spec.name == FAN_OUT for spec in context.tools)
        missing = not evidence.complete or (at_once and len(self._searches) == 1)
        if missing and (left is None or left > DELIVERY) and (leads := self._leads(view, at_once)):
            self._searches.add(context.turn)
            return search_call(*leads)
        chosen = self._chosen(view, evidence)
        held = [entry.handle for entry in view.curated]
        add = [handle for handle in chosen if handle not in held]
        remove = [handle for handle in held if handle not in chosen]
        if add:
            return curate_call(context.tools, dict.fromkeys(add, "high"), remove)
        return ToolCall("curate", {"remove_ids": remove}) if chosen and remove else ToolCall(END_SEARCH)

    def _leads(self, view: View, at_once: bool) -> list[str]:
        """Return the leads to follow next, by their handles if they have some; none if it is time to deliver."""
        shown = [lead for lead in view.leads if lead.name not in self._followed]
        if not shown or len(self._searches) > FOLLOWED:
            return []
        if at_once:
            drawn = [lead for lead in shown if self._rng.random() < KEPT] if self._draws else shown
            chosen = drawn or shown[:1]
        else:
            weights = [FALLOFF**place for place in range(len(shown))]
            chosen = self._rng.choices(shown, weights) if self._draws else shown[:1]
        self._followed.update(lead.name for lead in chosen)
        return [lead.entity or lead.name for lead in chosen]

    def _chosen(self, view: View, evidence: SeenEvidence) -> list[str]:
        """Return what to deliver: the gold that was seen, in the evidence order; where some is missing, the best others
        by evidence too, up to `GUESSES` in all."""
        gold = {document.handle for document in evidence.gold}
        order = dict.fromkeys((*view.ranked, *evidence.documents))
        found = [handle for handle in order if handle in gold]
        others = [] if evidence.complete else [handle for handle in order if handle not in gold]
        return [*found, *others[: max(0, GUESSES - len(found))]][: view.cap]
