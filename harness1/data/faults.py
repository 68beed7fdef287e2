"""The faults that a line of a dataset may have. A reader refuses the line, or notes it and leaves it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from harness1.errors import CorpusError

Given = TypeVar("Given")
Made = TypeVar("Made")


class DuplicateId(CorpusError):
    """The id occurred before."""


class EmptyText(CorpusError):
    """The document, or a chunk of it, has no text."""


class AbsentGold(CorpusError):
    """The corpus lacks what a query should find."""


class NoGold(CorpusError):
    """The query names nothing to find."""


Fault = Callable[[CorpusError], None]
"""Called with the fault of a line; if it returns, the line is left out."""


def refuse(error: CorpusError) -> None:
    """Raise the fault: the dataset cannot be read."""
    raise error


def made(
    located: Iterable[tuple[str, Given]], make: Callable[[str, Given], Made], fault: Fault
) -> Iterator[tuple[str, Made]]:
    """Yield what is made from the value at each place, with the place. Values that cannot be used go to `fault`."""
    for where, value in located:
        try:
            yield where, make(where, value)
        except CorpusError as error:
            fault(error)


def distinct(
    located: Iterable[tuple[str, Made]], name: Callable[[Made], str], fault: Fault
) -> Iterator[tuple[str, Made]]:
    """Yield the value at each place, with the place. Values whose id occurred before go to `fault`."""
    seen: set[str] = set()
    for where, value in located:
        if name(value) in seen:
            fault(DuplicateId(f"{where}: the id {name(value)!r} occurs a second time"))
        else:
            seen.add(name(value))
            yield where, value
