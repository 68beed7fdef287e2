"""The view: what the pieces of a context show, as typed values. Scripted policies read nothing else. Every value
appears in the text exactly as here, except `unit_id`, the id that a shown handle names, and the marks of entity
handles: ` (E3)` after a name is in `entities` and not in the value. With the mechanism `marks`, lines of text from
outside are indented, and titles escaped."""

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


class BudgetView(Record):
    """`used` of `limit` prompt tokens, which a transcript may exceed; `turn` counts finished turns."""

    used: int = 0
    limit: int = 0
    turn: int = 0
    max_turns: int = 0
    level: str = ""

    def turns_left(self) -> int | None:
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


class LeadView(Record):
    """A name worth a search, by handle the documents that name it (none: the question does), and its own handle."""

    name: str
    handles: tuple[str, ...] = ()
    entity: str = ""


class HitView(Record):
    """A hit of one turn. `found_by` holds (query number, rank), both from 0, of a fan-out or a single query."""

    turn: int
    document: DocumentView
    found_by: tuple[tuple[int, int], ...] = ()
    copies: int = 0
    passed_over: int = 0  # passages of a document that was read which are left out before this one
    entities: dict[str, str] = {}  # by handle: the names marked in title and text


class ActionView(Record):
    """The call of a turn, without its arguments if it was too long to be shown whole; for chat formats, not views."""

    turn: int
    call: ToolCall


class JudgementView(Record):
    """A verdict as reported to the turn that asked for it, with its passage (`known` if it was given before), or as
    remembered, with its claim. Both texts may be cut."""

    handle: str
    label: str
    passage: str = ""
    known: bool = False
    claim: str = ""


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


class MemoryView(Record):
    """What one piece shows of the memory, and of its limit; what it does not show is None."""

    cap: int | None = None  # the number of documents that can be delivered
    curated: tuple[CuratedView, ...] | None = None  # the whole curated set in delivered order
    ranked: tuple[str, ...] | None = None  # the handles of the pool by evidence, the best first
    leads: tuple[LeadView, ...] | None = None  # the names worth a search, the best first
    verdicts: tuple[JudgementView, ...] | None = None  # the newest verdicts, newest first


@dataclass
class View:
    """Everything visible now. Where several pieces show the same thing (orders that append), the last one counts."""

    query: str = ""
    handle: str = ""  # the question's handle, if queries may contain it
    entities: dict[str, str] = field(default_factory=dict)  # by handle, in the order shown: the form shown first
    budget: BudgetView = field(default_factory=BudgetView)
    curated: tuple[CuratedView, ...] = ()
    cap: int = LARGEST_CAP  # most documents that can be delivered; if not told, the most that any environment allows
    documents: dict[str, DocumentView] = field(default_factory=dict)  # by handle: the longest text shown
    ranked: tuple[str, ...] = ()  # handles by evidence, the best first; empty where documents are not ranked
    leads: tuple[LeadView, ...] = ()
    turns: dict[int, TurnView] = field(default_factory=dict)
    hits: dict[int, list[HitView]] = field(default_factory=dict)  # by turn, in the order shown
    verdicts: tuple[JudgementView, ...] = ()

    @classmethod
    def of(cls, shown: Sequence[Record]) -> View:
        """Collect the view from what each piece of a context shows, in their order. Where none shows the curated set
        whole, it is read from the turns, without ids of what is no longer shown."""
        view = cls()
        for each in shown:
            view._take(each)
        if any(isinstance(each, MemoryView) and each.curated is not None for each in shown):
            return view
        entries: dict[str, CuratedView] = {}
        for _, turn in sorted(view.turns.items()):
            for handle in (*turn.changes.removed, *turn.changes.evicted):
                entries.pop(handle, None)
            for handle, tag in (turn.changes.added | turn.changes.retagged).items():
                known = view.documents.get(handle)
                entries[handle] = CuratedView(handle, known.unit_id if known else UnitId(""), tag)
        view.curated = tuple(entries.values())
        return view

    def _take(self, shown: Record) -> None:
        names: Mapping[str, str] = {}
        match shown:
            case HitView(turn=turn, document=document, entities=names):
                self.hits.setdefault(turn, []).append(shown)
                keep_longest(self.documents, document)
            case DocumentView():
                keep_longest(self.documents, shown)
            case TurnView(turn=turn):
                self.turns[turn] = shown
            case QueryView(query=query, handle=handle, entities=names):
                self.query, self.handle = query, handle
            case BudgetView():
                self.budget = shown
            case MemoryView(leads=leads):
                for name in shown.__struct_fields__:
                    if (value := getattr(shown, name)) is not None:
                        setattr(self, name, value)
                names = {lead.entity: lead.name for lead in leads or () if lead.entity}
        for handle, name in names.items():
            self.entities.setdefault(handle, name)


def keep_longest(documents: dict[str, DocumentView], document: DocumentView) -> None:
    """Take a document in by its handle, unless as long a text of it is known."""
    known = documents.get(document.handle)
    if known is None or len(known.text) < len(document.text):
        documents[document.handle] = document
