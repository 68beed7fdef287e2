"""The pieces that tell where to look: the evidence order, the leads, the bridge documents and the shared entities."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cached_property

from harness1.config import Env
from harness1.env.render.pieces import Piece, piece
from harness1.env.render.turn_pieces import handle_of
from harness1.env.render.view import (
    BridgesView,
    BridgeView,
    LeadsView,
    LeadView,
    LinksView,
    LinkView,
    RankedView,
)
from harness1.memory.bridges import bridge_documents, rare_bridges
from harness1.memory.evidence_value import Assessment
from harness1.memory.leads import Lead
from harness1.memory.working_memory import WorkingMemory
from harness1.records import UnitId

LEAD_SOURCES = 3
"""Documents that are shown to name a lead."""
LINKING = 5
"""Bridge documents that are shown."""


class EvidenceOrder:
    """The evidence order of one state, with the place of every unit."""

    def __init__(self, found: Assessment) -> None:
        self.units, self._found = found.units, found

    @cached_property
    def places(self) -> dict[UnitId, int]:
        return {unit_id: place for place, unit_id in enumerate(self.units)}

    @cached_property
    def _reasons(self) -> list[str]:
        return self._found.reasons()

    def reason(self, unit_id: UnitId) -> str:
        """Return in a few words what speaks most for a unit, or an empty string."""
        return self._reasons[self.places[unit_id]]


def ranked_piece(memory: WorkingMemory, env: Env, ranking: EvidenceOrder, visible: Set[UnitId]) -> Piece:
    """Return the evidence order by handle. Only units without a line of their own come with a reason here."""
    shown = ranking.units[: env.evidence.lines]
    handles = tuple(handle_of(memory, unit_id) for unit_id in shown)
    words = []
    for handle, unit_id in zip(handles, shown, strict=True):
        reason = ranking.reason(unit_id) if unit_id in visible else ""
        words.append(f"{handle} ({reason})" if reason else handle)
    return piece("ranked", "user", f"By evidence: {', '.join(words)}.", RankedView(handles))


def leads_piece(memory: WorkingMemory, env: Env, leads: Sequence[Lead]) -> Piece:
    """Return what is worth a search, with handles and reasons; under minimal instructions, with handles alone."""
    shown, words = [], []
    for lead in leads:
        name = " ".join(lead.name.split())
        handles = tuple(handle_of(memory, unit_id) for unit_id in lead.sources[:LEAD_SOURCES])
        shown.append(LeadView(name, handles, memory.entities.handle_of(name)))
        if env.rendering.instructions == "minimal":
            source = f" ({', '.join(handles)})" if handles else ""
            words.append(f"{shown[-1].entity} {name}{source}".strip())
            continue
        source = f"named by {', '.join(handles)}" if handles else "named in the question"
        told = ["part of the question"] if lead.is_part else [shown[-1].entity, source, "not found yet"]
        words.append(f"{name} ({'; '.join(filter(None, told))})")
    said = "; ".join(words) or "nothing is open"
    return piece("leads", "user", f"Search next: {said}.", LeadsView(tuple(shown)))


def evidence_pieces(memory: WorkingMemory, env: Env, order: Sequence[UnitId]) -> list[Piece]:
    """Return what links documents: the bridge documents, where units are ranked in an `order`, and shared entities."""
    links = _links(memory, order) if env.evidence.ranks else None
    return [each for each in (links, _shared(memory, env, order)) if each is not None]


def _links(memory: WorkingMemory, order: Sequence[UnitId]) -> Piece | None:
    """Return the bridge documents with the names of the question that they link; None if there is none."""
    links = tuple(
        LinkView(handle_of(memory, bridge.unit_id), bridge.names) for bridge in bridge_documents(memory, order, LINKING)
    )
    words = [f"{link.handle} links {', '.join(link.names[:-1])} and {link.names[-1]}" for link in links]
    return piece("links", "user", f"Bridge documents: {'; '.join(words)}.", LinksView(links)) if links else None


def _shared(memory: WorkingMemory, env: Env, order: Sequence[UnitId]) -> Piece | None:
    """Return the shared entities: the most frequent ones, or, where units are ranked, those that lead on from the
    best. None where no entity is known."""
    if env.evidence.ranks:
        found = rare_bridges(memory, order, env.evidence.entities, env.evidence.documents)
    else:
        found = memory.evidence.bridges(env.evidence.entities, env.evidence.documents)
    if not found and not memory.evidence.singletons:
        return None
    bridges = []
    for bridge in found:
        handles = tuple(handle_of(memory, unit_id) for unit_id in bridge.unit_ids)
        bridges.append(BridgeView(bridge.entity, handles, bridge.total))
    words = [
        f"{bridge.entity} ({', '.join(bridge.handles)}"
        + (f" +{bridge.total - len(bridge.handles)} more)" if bridge.total > len(bridge.handles) else ")")
        for bridge in bridges
    ]
    text = "Shared entities: " + ("; ".join(words) or "none") + f". In one document only: {memory.evidence.singletons}."
    return piece("evidence", "user", text, BridgesView(tuple(bridges), memory.evidence.singletons))
