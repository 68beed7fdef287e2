"""Passages: the chunks that episodes were shown, stored once in a file and inflated in blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from harness1.viewer.page_file import deflated
from harness1.viewer.spool import Place, Spool

BLOCK = 64
"""Passages of a block."""
NUMBER_BYTES = 6
"""Upper limit of what a reference takes in a file."""


class Passage(NamedTuple):
    """A chunk as an episode was shown it."""

    chunk_id: str
    doc_id: str
    title: str
    text: str

    @property
    def body(self) -> str:
        """The text to which the stretches of `sliced` refer."""
        return f"{self.title}\n{self.text}"


class Passages:
    """The passages of all episodes of a file, numbered in the order in which they come."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._numbers: dict[bytes, int] = {}
        self._places: list[Place] = []
        self._sizes = array("L")

    def numbers(self, passages: Iterable[Passage]) -> Sequence[int]:
        """Return the number of each passage; a new one is stored."""
        return array("L", map(self._number, passages))

    def size(self, number: int) -> int:
        """Return the most bytes that a passage takes in a file."""
        return self._sizes[number]

    def blocks(self, numbers: Sequence[int]) -> Iterable[str]:
        """Yield the content of the tags that hold some passages, in their order."""
        for start in range(0, len(numbers), BLOCK):
            held = (self._spool.get(*self._places[number]) for number in numbers[start : start + BLOCK])
            yield deflated([msgspec.Raw(each) for each in held])

    def _number(self, passage: Passage) -> int:
        data = msgspec.json.encode(passage)
        key = blake2b(data, digest_size=16).digest()
        if key not in self._numbers:
            self._numbers[key] = len(self._places)
            self._places.append(self._spool.put(data))
            self._sizes.append(len(deflated(msgspec.Raw(data))) + NUMBER_BYTES)
        return self._numbers[key]
