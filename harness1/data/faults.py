"""The faults that a line of a dataset may have. A reader refuses the line, or notes it and leaves it out."""

from __future__ import annotations

from collections.abc import Callable

from harness1.errors import CorpusError


class DuplicateId(CorpusError):
    """The id occurred before."""


class EmptyText(CorpusError):
    """A document or a chunk of one without text."""


class AbsentGold(CorpusError):
    """The corpus lacks what a query should find."""


class NoGold(CorpusError):
    """A query without anything to find."""


Fault = Callable[[CorpusError], None]
"""Called with the fault of a line; if it returns, the line is left out."""


def refuse(error: CorpusError) -> None:
    """Raise the fault: the dataset cannot be read."""
    raise error
