"""The view: what the kept pieces of a context show, as typed values. Scripted policies read it and nothing else.

Every value stands in the text, as it stands there; the exceptions are `unit_id`, the id that a shown handle names, and
the marks of entity handles: ` (E3)` behind a name is in `entities` and not in the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harness1.env.render.pieces import Piece
from harness1.memory.history import HistoryLine
from harness1.records import Note, Record, Tag, ToolCall, UnitId


class QueryView(Record):
    """The question, on one line, and what the handles in it stand for."""

    query: str
    entities: dict[str, str] = {}


class LimitsView(Record):
    """How many documents can be delivered."""

    cap: int


class BudgetView(Record):
    """`used` of `limit` prompt tokens, which a transcript may exceed; `turn` counts finished turns."""

    used: int
    limit: int
    turn: int
    max_turns: int
    level: str = ""

    def turns_left(self) -> int | None:
        """Turns that remain; None where no budget line is shown."""
        return self.max_turns - self.turn if self.max_turns else None


class DocumentView(Record):
    """A document as some piece shows it; `unit_id` is the id that the handle stands for."""

    handle: str
    unit_id: UnitId
    title: str
    text: str


class CuratedView(Record):
    """One entry of the curated set; without a tag where tags are off."""

    handle: str
    unit_id: UnitId
    tag: Tag | None


class CuratedSetView(Record):
    """The whole curated set in delivered order: handles and tags."""

    entries: tuple[CuratedView, ...]
    cap: int


class PoolSizeView(Record):
    """How many units are pooled, how many of them are not curated, and how many near duplicates are hidden."""

    total: int
    uncurated: int
    hidden: int


class OlderView(Record):
    """Handles of pooled documents that are not shown with a snippet."""

    handles: tuple[str, ...]
    more: int


class HitView(Record):
    """A hit of one turn. `found_by` holds (query number, rank), both from 0: the marks of a fan-out, and of a single
    query the place among the hits as they came."""

    turn: int
    document: DocumentView
    found_by: tuple[tuple[int, int], ...] = ()
    copies: int = 0
    entities: dict[str, str] = {}
    """By handle: the names that are marked in title and text."""


class ActionView(Record):
    """The call of a turn; without arguments where it was too long to be shown whole."""

    turn: int
    call: ToolCall


class JudgementView(Record):
    """A verdict as the turn that asked for it was told; `known` if it had been given before. The passage may be cut."""

    handle: str
    label: str
    passage: str = ""
    known: bool = False


class ChangesView(Record):
    """What an action did to the curated set, and of which documents it hid copies, all by handle."""

    added: dict[str, Tag | None] = {}
    retagged: dict[str, Tag | None] = {}
    removed: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    pruned: tuple[str, ...] = ()


class TurnView(Record):
    """What one turn was told, without its hits; queries may be cut."""

    turn: int
    tool: str
    queries: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    error: Note | None = None
    verdicts: tuple[JudgementView, ...] = ()
    changes: ChangesView = ChangesView()


class BridgeView(Record):
    """An entity in at least two documents; `handles` may be cut, `total` counts them all."""

    entity: str
    handles: tuple[str, ...]
    total: int


class BridgesView(Record):
    """The shared entities, and how many entities are in one document only."""

    bridges: tuple[BridgeView, ...]
    singletons: int


class VerdictView(Record):
    """A remembered verdict; the claim may be cut."""

    handle: str
    claim: str
    label: str


class VerdictsView(Record):
    """The newest verdicts, newest first."""

    verdicts: tuple[VerdictView, ...]


class HistoryView(Record):
    """The last actions, oldest first, and how many came before them."""

    lines: tuple[HistoryLine, ...]
    earlier: int


NO_BUDGET = BudgetView(0, 0, 0, 0)
NO_POOL = PoolSizeView(0, 0, 0)
NO_OLDER = OlderView((), 0)
NO_BRIDGES = BridgesView((), 0)
NO_HISTORY = HistoryView((), 0)


@dataclass
class View:
    """Everything visible now. Where several pieces show the same thing (orders that append), the last one holds."""

    query: str = ""
    entities: dict[str, str] = field(default_factory=dict)
    """By handle, in the order shown: the form of the name that was shown first."""
    budget: BudgetView = NO_BUDGET
    curated: tuple[CuratedView, ...] = ()
    cap: int = 0
    pool: PoolSizeView = NO_POOL
    documents: dict[str, DocumentView] = field(default_factory=dict)
    """By handle; the longest text that is shown."""
    older: OlderView = NO_OLDER
    actions: dict[int, ToolCall] = field(default_factory=dict)
    turns: dict[int, TurnView] = field(default_factory=dict)
    hits: dict[int, list[HitView]] = field(default_factory=dict)
    """By turn, in the order shown."""
    bridges: BridgesView = NO_BRIDGES
    verdicts: tuple[VerdictView, ...] = ()
    history: HistoryView = NO_HISTORY

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> View:
        """The view of the pieces of a context, in their order."""
        view = cls()
        shown = [piece.shows for piece in pieces if piece.shows is not None]
        for each in shown:
            view._take(each)
        if not any(isinstance(each, CuratedSetView) for each in shown):
            view.curated = view._told()
        return view

    def _take(self, shown: Record) -> None:
        match shown:
            case HitView(turn=turn, document=document):
                self.hits.setdefault(turn, []).append(shown)
                self._document(document)
                self._name(shown.entities)
            case DocumentView():
                self._document(shown)
            case TurnView(turn=turn):
                self.turns[turn] = shown
            case ActionView(turn=turn, call=call):
                self.actions[turn] = call
            case CuratedSetView(entries=entries, cap=cap):
                self.curated, self.cap = entries, cap
            case VerdictsView(verdicts=verdicts):
                self.verdicts = verdicts
            case _:
                self._scalar(shown)

    def _scalar(self, shown: Record) -> None:
        match shown:
            case QueryView(query=query):
                self.query = query
                self._name(shown.entities)
            case LimitsView(cap=cap):
                self.cap = cap
            case BudgetView():
                self.budget = shown
            case PoolSizeView():
                self.pool = shown
            case OlderView():
                self.older = shown
            case BridgesView():
                self.bridges = shown
            case HistoryView():
                self.history = shown
            case HistoryLine():
                self.history = HistoryView((*self.history.lines, shown), self.history.earlier)

    def _told(self) -> tuple[CuratedView, ...]:
        """The curated set as the turns tell of it, where no piece shows it whole. The document of an entry may not be
        shown any more: then it has no id."""
        entries: dict[str, CuratedView] = {}
        for _, turn in sorted(self.turns.items()):
            for handle in (*turn.changes.removed, *turn.changes.evicted):
                entries.pop(handle, None)
            for handle, tag in (turn.changes.added | turn.changes.retagged).items():
                known = self.documents.get(handle)
                entries[handle] = CuratedView(handle, known.unit_id if known else UnitId(""), tag)
        return tuple(entries.values())

    def _name(self, entities: Mapping[str, str]) -> None:
        for handle, name in entities.items():
            self.entities.setdefault(handle, name)

    def _document(self, document: DocumentView) -> None:
        known = self.documents.get(document.handle)
        if known is None or len(known.text) < len(document.text):
            self.documents[document.handle] = document
