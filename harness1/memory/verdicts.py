"""The verdicts of an episode: which claim was checked against which unit, and what came of it."""

from __future__ import annotations

import msgspec

from harness1.records import UnitId, Verdict


class VerificationCache(msgspec.Struct):
    """The verdicts of an episode by claim and unit, in order of insertion, as plain data."""

    verdicts: dict[str, Verdict] = {}
    judged: dict[str, int] = {}
    """How many stored chunks the unit had when it was judged."""

    def get(self, claim: str, unit_id: UnitId, chunks: int = 0) -> Verdict | None:
        """The stored verdict; claims that differ in case, white space or final punctuation are the same.

        Of a unit that has more than the `chunks` that were judged, nothing is known any more.
        """
        key = _cache_key(claim, unit_id)
        return self.verdicts.get(key) if self.judged.get(key, 0) >= chunks else None

    def put(self, verdict: Verdict, chunks: int = 0) -> None:
        """Store a verdict on a unit of so many stored chunks as the newest, in place of an earlier one."""
        key = _cache_key(verdict.claim, verdict.unit_id)
        self.verdicts.pop(key, None)
        self.verdicts[key] = verdict
        self.judged[key] = chunks

    def recent(self, limit: int) -> tuple[Verdict, ...]:
        """The newest verdicts, newest first."""
        newest = reversed(self.verdicts.values())
        return tuple(verdict for verdict, _ in zip(newest, range(limit), strict=False))

    def fork(self) -> VerificationCache:
        """An independent copy that shares the verdicts."""
        return VerificationCache(dict(self.verdicts), dict(self.judged))


def _cache_key(claim: str, unit_id: UnitId) -> str:
    return f"{' '.join(claim.casefold().split()).rstrip(' .!?;:')}\n{unit_id}"
