"""Verification: does a document support a claim? What every verifier answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from harness1.records import Record, UnitId

Label: TypeAlias = Literal["yes", "no", "unclear"]


class Judgement(Record, frozen=True):
    """Whether a document supports a claim, and the passage of the document on which that rests."""

    label: Label
    sentence: str = ""


class VerifierFault(Record, frozen=True):
    """The verifier failed on one document. It is a value, so that the others keep their judgements."""

    message: str


class Verifier(Protocol):
    """Judges claims. Implementations are safe to share between concurrent episodes."""

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        """Judge a claim against each document by its text alone, in order."""
        ...
