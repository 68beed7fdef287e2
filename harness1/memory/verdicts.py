"""The verdicts of an episode: claims, the units they were checked against, and the results."""

from __future__ import annotations

from harness1.memory.forkable import Forkable
from harness1.records import UnitId, Verdict


class VerificationCache(Forkable):
    """The verdicts of an episode by claim and unit, in order of insertion, as plain data."""

    verdicts: dict[str, Verdict] = {}
    judged: dict[str, int] = {}
    """Stored chunks of the unit when it was judged."""

    def get(self, claim: str, unit_id: UnitId, chunks: int = 0) -> Verdict | None:
        """Return the stored verdict, if any. Claims that differ in case, white space or final punctuation are the same.

        A verdict no longer counts when the unit has more stored chunks than were judged.
        """
        key = _cache_key(claim, unit_id)
        return self.verdicts.get(key) if self.judged.get(key, 0) >= chunks else None

    def put(self, verdict: Verdict, chunks: int = 0) -> None:
        """Store a verdict as the newest, in place of an earlier one. `chunks` counts the unit's stored chunks."""
        key = _cache_key(verdict.claim, verdict.unit_id)
        self.verdicts.pop(key, None)
        self.verdicts[key] = verdict
        self.judged[key] = chunks

    def recent(self, limit: int) -> tuple[Verdict, ...]:
        """Return the newest verdicts, newest first."""
        newest = reversed(self.verdicts.values())
        return tuple(verdict for verdict, _ in zip(newest, range(limit), strict=False))


def _cache_key(claim: str, unit_id: UnitId) -> str:
    return f"{' '.join(claim.casefold().split()).rstrip(' .!?;:')}\n{unit_id}"
