"""The view: what the kept pieces of a context show, as typed values. Scripted policies read it and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from harness1.env.history import HistoryLine
from harness1.env.pieces import Piece
from harness1.records import Delta, Note, Record, Tag, ToolCall, UnitId, Verdict


class QueryView(Record):
    """The question, as the task has it."""

    query: str


class BudgetView(Record):
    """`used` of `limit` prompt tokens; `turn` counts finished turns."""

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
    """One entry of the curated set."""

    handle: str
    unit_id: UnitId
    tag: Tag


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
    """A hit of one turn. `found_by` holds (query number, rank), both from 0."""

    turn: int
    document: DocumentView
    found_by: tuple[tuple[int, int], ...] = ()
    new: bool = True
    copies: int = 0


class TurnView(Record):
    """What one turn did and was told, without its hits."""

    turn: int
    action: ToolCall | None
    queries: tuple[str, ...] = ()
    returned: int = 0
    notes: tuple[Note, ...] = ()
    error: Note | None = None
    verdicts: tuple[Verdict, ...] = ()
    delta: Delta = Delta()


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
    budget: BudgetView = NO_BUDGET
    curated: tuple[CuratedView, ...] = ()
    cap: int = 0
    pool: PoolSizeView = NO_POOL
    documents: dict[str, DocumentView] = field(default_factory=dict)
    """By handle; the longest text that is shown."""
    older: OlderView = NO_OLDER
    turns: dict[int, TurnView] = field(default_factory=dict)
    hits: dict[int, list[HitView]] = field(default_factory=dict)
    """By turn, in the order shown."""
    bridges: BridgesView = NO_BRIDGES
    verdicts: tuple[VerdictView, ...] = ()
    history: HistoryView = NO_HISTORY

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> View:
        view = cls()
        for piece in pieces:
            if piece.shows is not None:
                view._take(piece.shows)
        return view

    def _take(self, shown: Record) -> None:
        match shown:
            case HitView(turn=turn, document=document):
                self.hits.setdefault(turn, []).append(shown)
                self._document(document)
            case DocumentView():
                self._document(shown)
            case TurnView(turn=turn):
                self.turns[turn] = shown
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

    def _document(self, document: DocumentView) -> None:
        known = self.documents.get(document.handle)
        if known is None or len(known.text) < len(document.text):
            self.documents[document.handle] = document
