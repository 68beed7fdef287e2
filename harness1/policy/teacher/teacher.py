"""The oracle teacher: an example to imitate. It searches, curates and stops with knowledge of the gold but never
reveals it: every word that it writes is in the question or in an earlier view."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence

from harness1.env.render import Context
from harness1.env.view import View
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.memory.entities import in_handles
from harness1.memory.question import claim
from harness1.policy.oracle import wanted
from harness1.policy.policy import Decision
from harness1.policy.scripted import SPARE_TURNS, curate_call, is_full
from harness1.policy.teacher.evidence import SeenEvidence
from harness1.policy.teacher.queries import subject
from harness1.policy.teacher.reasons import line
from harness1.policy.teacher.search import Move, TeacherSearch, shortened
from harness1.records import Gold, Tag, Task, ToolCall, UnitId
from harness1.tools.documents import END_SEARCH, MIN_CLAIM_CHARACTERS
from harness1.tools.tool import ToolSpec

LOOK = 0.4
"""Share of episodes that read a found document in full, and share of those that review the set before pruning."""
GREPS = 0.3
"""Share of episodes that look for the first missing name by a pattern."""
NEAR = (0, 2)
"""Range of the number of best other documents that are delivered as well."""
GUESSES = 2
"""Fewest documents delivered if no gold was found."""
FAIR = 0.1
"""A document that is worth less to the question is tagged low."""
CHECKED = 3
REVIEWED = 5
REVISION = 5
"""Increased whenever the teacher, or a part of it elsewhere, decides or writes differently."""


class OracleTeacher:
    """A teacher that shows how to search when the gold is known. `golds` are by task id.

    Raises:
        UsageError: on opening, if the task's gold was not given.
    """

    name = "oracle-teacher"
    hash = digest(["oracle-teacher", REVISION])

    def __init__(self, golds: Mapping[str, Gold]) -> None:
        self._golds = golds

    def open(self, task: Task, seed: int) -> TeacherSession:
        if task.task_id not in self._golds:
            raise UsageError(f"the oracle teacher needs the gold of task {task.task_id}")
        return TeacherSession(wanted(self._golds[task.task_id]), random.Random(f"{task.task_id}/{seed}"))


class TeacherSession:
    """One episode: search while evidence is missing, look closer, verify, curate, review, prune, end.

    All randomness comes from `style`: how many near misses are kept, whether to look twice, and the wording.
    """

    def __init__(self, needs: tuple[frozenset[UnitId], ...], style: random.Random) -> None:
        self._needs, self._style = needs, style
        self._near = style.randint(*NEAR)
        self._inspects, self._reviews = style.random() < LOOK, style.random() < LOOK
        self._search = TeacherSearch(greps=style.random() < GREPS)
        self._evidence: SeenEvidence | None = None
        self._searches = True
        self._verified = False
        self._chosen: dict[str, Tag] = {}
        """Tags of the documents to deliver, by handle; empty until decided."""

    async def act(self, context: Context) -> Decision:
        if self._evidence is None:
            self._evidence = SeenEvidence(context.view.query, self._needs)
        self._evidence.read(context.view)
        move = self._next(context.view, self._evidence, context.tools)
        call = _in_handles(move.call, context.view)
        return Decision((call,), line(move.kind, self._style.randrange(60), move.source, move.topic))

    def fork(self) -> TeacherSession:
        return copy.deepcopy(self)

    def _next(self, view: View, evidence: SeenEvidence, tools: Sequence[ToolSpec]) -> Move:
        names = {spec.name for spec in tools}
        left = view.budget.turns_left()
        if self._searches and evidence.documents and is_full(view):
            if (move := _make_room(view, evidence, names)) is not None:
                return move
            self._searches = False
        if self._searches and (not evidence.documents or left is None or left > SPARE_TURNS - ("verify" not in names)):
            if left is None and (move := self._keep(view, evidence, tools)) is not None:
                return move
            if (move := self._search.next(view, evidence, names)) is not None:
                return move
        self._searches = False
        if not self._chosen:
            return self._check(view, evidence, names) or self._curate(view, evidence, tools) or _end(view, evidence)
        return self._prune(view, tools) or _end(view, evidence)

    def _keep(self, view: View, evidence: SeenEvidence, tools: Sequence[ToolSpec]) -> Move | None:
        """Curate new finds at once: when the remaining turns are not shown, each may be the last."""
        held = {entry.handle for entry in view.curated}
        new = [document.handle for document in evidence.gold if document.handle not in held]
        if not new or len(held) + len(new) > view.cap:
            return None
        return Move(curate_call(tools, dict.fromkeys(new, "high")), "keep", tuple(new))

    def _check(self, view: View, evidence: SeenEvidence, names: set[str]) -> Move | None:
        """Sometimes read a found document in full; verify the question's statement against the found documents."""
        left = view.budget.turns_left()
        if self._inspects and "read_document" in names and (left is None or left > SPARE_TURNS):
            self._inspects = False
            if (move := self._search.read(evidence, "inspect")) is not None:
                return move
        statement = shortened(claim(view.query))
        found = [document.handle for document in evidence.gold[:CHECKED]]
        handles = [*found, *(rival.handle for rival in evidence.rivals()[:1])]
        if self._verified or "verify" not in names or not handles or len(statement) < MIN_CLAIM_CHARACTERS:
            return None
        if left is not None and left < SPARE_TURNS:
            return None
        self._verified = True
        call = ToolCall("verify", {"doc_ids": handles, "claim": statement})
        return Move(call, "verify", tuple(found or handles), subject(view.query))

    def _curate(self, view: View, evidence: SeenEvidence, tools: Sequence[ToolSpec]) -> Move | None:
        """Decide what is delivered. If the set is reviewed next, nothing is removed before that."""
        self._chosen = self._choice(view, evidence)
        if not self._chosen:
            return None
        left, held = view.budget.turns_left(), {entry.handle for entry in view.curated}
        self._reviews &= any(spec.name == "review_docs" for spec in tools) and (left is None or left > SPARE_TURNS)
        self._reviews &= not held <= self._chosen.keys()
        found = tuple(document.handle for document in evidence.gold)
        sure = tuple(handle for handle in found if handle in _supported(view))
        alone = "alone" if len(found) == len(self._chosen) else "curate"
        kind = "guess" if not found else "select" if self._reviews else "confirmed" if sure else alone
        source = sure if kind == "confirmed" else found
        return self._edit(view, tools, Move(ToolCall("curate"), kind, source, subject(view.query)))

    def _choice(self, view: View, evidence: SeenEvidence) -> dict[str, Tag]:
        """Return the tags of the documents to deliver, most important first: gold, then a few near misses."""
        supported = _supported(view)
        scores = evidence.score.candidates
        tags: dict[str, Tag] = {}
        rivals = evidence.rivals()
        for document in evidence.gold:
            shown = scores.get(document.handle)
            certain = document.handle in supported or (shown is not None and shown.proven)
            tags[document.handle] = "very_high" if certain else "high"
        ordered = dict(sorted(tags.items(), key=lambda entry: entry[1] != "very_high"))
        for rival in rivals[: self._near if tags else max(self._near, GUESSES)]:
            ordered[rival.handle] = "fair" if rival.score >= FAIR else "low"
        return dict(list(ordered.items())[: view.cap])

    def _prune(self, view: View, tools: Sequence[ToolSpec]) -> Move | None:
        """Review the chosen documents, if that is planned, and then apply the difference from the curated set."""
        firm = tuple(handle for handle, tag in self._chosen.items() if tag in ("very_high", "high"))
        if self._reviews:
            self._reviews = False
            held = (entry.handle for entry in view.curated if entry.handle not in self._chosen)
            handles = [*self._chosen, *held][:REVIEWED]
            return Move(ToolCall("review_docs", {"doc_ids": handles}), "review", tuple(handles))
        return self._edit(view, tools, Move(ToolCall("curate"), "prune", firm or tuple(self._chosen)))

    def _edit(self, view: View, tools: Sequence[ToolSpec], move: Move) -> Move | None:
        """Curate the difference between the chosen and the curated documents, if any; removals wait for a review.

        Without tags, the order of addition is the order of delivery: everything is removed and added again.
        """
        tagged = any("importance" in spec.parameters["properties"] for spec in tools if spec.name == "curate")
        held = {entry.handle: entry.tag for entry in view.curated}
        add = {name: tag for name, tag in self._chosen.items() if name not in held or (tagged and held[name] != tag)}
        remove = [] if self._reviews else [handle for handle in held if handle not in self._chosen]
        if not add and not remove:
            return None
        if not tagged and not self._reviews:
            add, remove = self._chosen, list(held)
        call = curate_call(tools, add, remove) if add else ToolCall("curate", {"remove_ids": remove})
        # A line may only speak of removal if something is removed: otherwise use the line that does not.
        kind = "tag" if move.kind in ("curate", "alone", "confirmed") and not remove else move.kind
        return Move(call, kind, move.source, move.topic)


def _in_handles(call: ToolCall, view: View) -> ToolCall:
    """Replace names in a search by their handles, if they have any."""
    match call.arguments:
        case {"query": str(query)}:
            return ToolCall(call.name, {"query": in_handles(query, view.entities)})
        case {"queries": list(queries)}:
            return ToolCall(call.name, {"queries": [in_handles(query, view.entities) for query in queries]})
    return call


def _make_room(view: View, evidence: SeenEvidence, names: set[str]) -> Move | None:
    """Remove the text of all shown documents that are not gold from a transcript, if there are any."""
    gold = {document.handle for document in evidence.gold}
    shown = dict.fromkeys(hit.document.handle for hits in view.hits.values() for hit in hits)
    useless = [handle for handle in shown if handle not in gold]
    if not useless or "prune_chunks" not in names:
        return None
    return Move(ToolCall("prune_chunks", {"doc_ids": useless}), "make_room", tuple(gold), subject(view.query))


def _supported(view: View) -> set[str]:
    """Return the documents that were found to support the claim."""
    return {verdict.handle for verdict in view.verdicts if verdict.label == "yes"}


def _end(view: View, evidence: SeenEvidence) -> Move:
    topic = subject(view.query)
    kind = "end" if evidence.complete else "give_up"
    return Move(ToolCall(END_SEARCH, {"reasoning": line(f"{kind}_argument", 0, topic=topic)}), kind, topic=topic)
