"""The passages of a document that matter to a question."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.memory.compress import okapi
from harness1.memory.question import SCANNED_CHARACTERS, content_terms


def by_relevance(passages: Sequence[str], question: str) -> list[int]:
    """Return the positions of the passages of one document, those nearest to a question first.

    They are scored by Okapi BM25 over the stems of their words without function words; the statistics are those of this
    document. Ties go to the earlier passage.
    """
    scores = okapi([content_terms(passage) for passage in passages], content_terms(question[:SCANNED_CHARACTERS]))
    return sorted(range(len(passages)), key=lambda at: -scores[at])
