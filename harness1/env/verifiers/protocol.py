"""The protocol of verifiers, which judge whether documents support a claim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from harness1.records import Record, UnitId

Label: TypeAlias = Literal["yes", "no", "unclear"]


class Judgement(Record, frozen=True):
    """A verdict on one document, with the passage that supports it."""

    label: Label
    sentence: str = ""


class VerifierFault(Record, frozen=True):
    """A failure on one document, as a value: the other documents keep their judgements."""

    message: str


class Verifier(Protocol):
    """Judges claims; concurrent episodes may share it."""

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        """Judge a claim against the text of each document, in order."""
        ...
