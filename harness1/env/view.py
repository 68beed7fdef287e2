"""The view: what the pieces of a context show, as typed values. Scripted policies read nothing else.

Every value appears in the text exactly as here, except `unit_id`, the id that a shown handle names, and the marks of
entity handles: ` (E3)` after a name is in `entities` and not in the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness1.config.env import LARGEST_CAP
from harness1.records import Note, Record, Tag, ToolCall, UnitId


class QueryView(Record):
    """The question on one line, the names behind the handles in it, and its own handle, if queries may contain that."""

    query: str
    entities: dict[str, str] = {}
    handle: str = ""


class LimitsView(Record):
    """The number of documents that can be delivered."""

    cap: int


class BudgetView(Record):
    """`used` of `limit` prompt tokens, which a transcript may exceed; `turn` counts finished turns."""

    used: int
    limit: int
    turn: int
    max_turns: int
    level: str = ""

    def turns_left(self) -> int | None:
        """Return the turns that remain, or None if no budget line is shown."""
        return self.max_turns - self.turn if self.max_turns else None


class DocumentView(Record):
    """A document as a piece shows it; `unit_id` is the id behind the handle."""

    handle: str
    unit_id: UnitId
    title: str
    text: str


class CuratedView(Record):
    """An entry of the curated set; it has no tag where tags are off."""

    handle: str
    unit_id: UnitId
    tag: Tag | None


class CuratedSetView(Record):
    """The whole curated set in delivered order: handles and tags."""

    entries: tuple[CuratedView, ...]
    cap: int


class RankedView(Record):
    """The handles of the pool by evidence, the best first."""

    handles: tuple[str, ...]


class LeadView(Record):
    """A name worth a search, and the documents that name it, by handle; none if the question does. `entity` is the
    handle of the name, where entities have handles."""

    name: str
    handles: tuple[str, ...] = ()
    entity: str = ""


class LeadsView(Record):
    """The names worth a search, the best first."""

    leads: tuple[LeadView, ...]


class HitView(Record):
    """A hit of one turn. `found_by` holds (query number, rank), both from 0: the marks of a fan-out, or the place among
    the hits of a single query."""

    turn: int
    document: DocumentView
    found_by: tuple[tuple[int, int], ...] = ()
    copies: int = 0
    passed_over: int = 0
    """Passages of a document that was read which are left out before this one."""
    entities: dict[str, str] = {}
    """By handle: the names marked in title and text."""


class ActionView(Record):
    """The call of a turn, without its arguments if it was too long to be shown whole; for chat formats, not views."""

    turn: int
    call: ToolCall


class JudgementView(Record):
    """A verdict as reported to the turn that asked for it; `known` if it was given before. The passage may be cut."""

    handle: str
    label: str
    passage: str = ""
    known: bool = False


class ChangesView(Record):
    """The changes that an action made to the curated set, and the documents whose copies it hid, all by handle."""

    added: dict[str, Tag | None] = {}
    retagged: dict[str, Tag | None] = {}
    removed: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    pruned: tuple[str, ...] = ()


class TurnView(Record):
    """The report on one turn without its hits; queries may be cut."""

    turn: int
    tool: str
    queries: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    error: Note | None = None
    verdicts: tuple[JudgementView, ...] = ()
    changes: ChangesView = ChangesView()


class VerdictView(Record):
    """A remembered verdict; the claim may be cut."""

    handle: str
    claim: str
    label: str


class VerdictsView(Record):
    """The newest verdicts, newest first."""

    verdicts: tuple[VerdictView, ...]


NO_BUDGET = BudgetView(0, 0, 0, 0)


@dataclass
class View:
    """Everything visible now. Where several pieces show the same thing (orders that append), the last one counts."""

    query: str = ""
    handle: str = ""
    """The question's handle, if queries may contain it."""
    entities: dict[str, str] = field(default_factory=dict)
    """By handle, in the order shown: the form of the name that was shown first."""
    budget: BudgetView = NO_BUDGET
    curated: tuple[CuratedView, ...] = ()
    cap: int = LARGEST_CAP
    """Most documents that can be delivered; under minimal instructions, the most that any environment allows."""
    documents: dict[str, DocumentView] = field(default_factory=dict)
    """By handle: the longest text shown."""
    ranked: tuple[str, ...] = ()
    """Handles by evidence, the best first; empty where documents are not ranked."""
    leads: tuple[LeadView, ...] = ()
    turns: dict[int, TurnView] = field(default_factory=dict)
    hits: dict[int, list[HitView]] = field(default_factory=dict)
    """By turn, in the order shown."""
    verdicts: tuple[VerdictView, ...] = ()

    @classmethod
    def of(cls, shown: Sequence[Record]) -> View:
        """Collect the view from what each piece of a context shows, in their order."""
        view = cls()
        for each in shown:
            view._take(each)
        if not any(isinstance(each, CuratedSetView) for each in shown):
            view.curated = view._read_changes()
        return view

    def _take(self, shown: Record) -> None:
        match shown:
            case HitView(turn=turn, document=document):
                self.hits.setdefault(turn, []).append(shown)
                self._add_document(document)
                self._add_names(shown.entities)
            case DocumentView():
                self._add_document(shown)
            case TurnView(turn=turn):
                self.turns[turn] = shown
            case CuratedSetView(entries=entries, cap=cap):
                self.curated, self.cap = entries, cap
            case VerdictsView(verdicts=verdicts):
                self.verdicts = verdicts
            case QueryView(query=query, handle=handle):
                self.query, self.handle = query, handle
                self._add_names(shown.entities)
            case LimitsView(cap=cap):
                self.cap = cap
            case BudgetView():
                self.budget = shown
            case RankedView(handles=handles):
                self.ranked = handles
            case LeadsView(leads=leads):
                self.leads = leads
                self._add_names({lead.entity: lead.name for lead in leads if lead.entity})

    def _read_changes(self) -> tuple[CuratedView, ...]:
        """Return the curated set as the turns report it, for contexts without a piece that shows it whole. An entry has
        no id if its document is no longer shown."""
        entries: dict[str, CuratedView] = {}
        for _, turn in sorted(self.turns.items()):
            for handle in (*turn.changes.removed, *turn.changes.evicted):
                entries.pop(handle, None)
            for handle, tag in (turn.changes.added | turn.changes.retagged).items():
                known = self.documents.get(handle)
                entries[handle] = CuratedView(handle, known.unit_id if known else UnitId(""), tag)
        return tuple(entries.values())

    def _add_names(self, entities: Mapping[str, str]) -> None:
        for handle, name in entities.items():
            self.entities.setdefault(handle, name)

    def _add_document(self, document: DocumentView) -> None:
        known = self.documents.get(document.handle)
        if known is None or len(known.text) < len(document.text):
            self.documents[document.handle] = document
