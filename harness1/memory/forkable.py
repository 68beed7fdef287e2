"""The parts of a working memory, which are copied together."""

from __future__ import annotations

from typing import Any, Self

import msgspec


class Forkable(msgspec.Struct):
    """A part of the state of an episode, as plain data."""

    def fork(self) -> Self:
        """Return an independent copy: dictionaries, lists, buffers and parts are its own, what is immutable is
        shared."""
        return type(self)(*map(_own, msgspec.structs.astuple(self)))


def _own(value: Any) -> Any:
    if isinstance(value, Forkable):
        return value.fork()
    return value.copy() if isinstance(value, dict | list | bytearray) else value
