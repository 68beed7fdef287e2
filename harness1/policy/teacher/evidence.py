"""The documents that the views of an episode have shown so far, and which of them are gold."""

from __future__ import annotations

from harness1.env.view import DocumentView, View
from harness1.policy.teacher.evidence_score import EvidenceScore, ScoredDocument
from harness1.records import UnitId


class SeenEvidence:
    """Documents collected view by view. Texts and handles come from the views alone; the gold only sorts them.

    Args:
        question: as the first view shows it.
        needs: what must be curated, as returned by `harness1.policy.oracle.wanted`.
    """

    def __init__(self, question: str, needs: tuple[frozenset[UnitId], ...]) -> None:
        self.score = EvidenceScore(question)
        self.documents: dict[str, DocumentView] = {}
        """By handle, in the order seen, with the longest text shown."""
        self._needs = needs

    def read(self, view: View) -> None:
        """Add a view: all documents that it shows, and the hits of the turn that has just finished."""
        for document in view.documents.values():
            known = self.documents.get(document.handle)
            if known is None or len(known.text) < len(document.text):
                self.documents[document.handle] = document
        self.score.read(view)

    @property
    def gold(self) -> list[DocumentView]:
        """The gold documents, in the order seen."""
        wanted = frozenset().union(*self._needs)
        return [document for document in self.documents.values() if document.unit_id in wanted]

    @property
    def complete(self) -> bool:
        """True if a unit that satisfies it was seen for every need."""
        seen = {document.unit_id for document in self.documents.values()}
        return not any(need.isdisjoint(seen) for need in self._needs)

    def rivals(self) -> list[ScoredDocument]:
        """Return the hits that are not gold, most plausible first."""
        gold = {document.handle for document in self.gold}
        return [candidate for candidate in self.score.update() if candidate.handle not in gold]

    def heads(self) -> set[str]:
        """Return the normalised titles of the documents seen."""
        return {candidate.head for candidate in self.score.candidates.values()}
