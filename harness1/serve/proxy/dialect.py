"""The API of a provider as one value, which reads a body and writes a reply, a stream and an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from harness1.serve.proxy.chat import ChatReply, ChatRequest

Event = tuple[str, dict[str, Any]]
"""Name (or "") and data of an event of a stream."""


class Dialect(NamedTuple):
    """The API of one provider. `neutral` lists unsupported parameters with the values that change nothing.

    `read` raises `Refused`. `events` returns a reply as a stream, which ends with `last`.
    """

    name: str
    neutral: Mapping[str, tuple[Any, ...]]
    read: Callable[[Mapping[str, Any]], ChatRequest]
    whole: Callable[[ChatReply], dict[str, Any]]
    events: Callable[[ChatReply, bool], list[Event]]
    error: Callable[[int, str], dict[str, Any]]
    last: str = ""

    def stream(self, reply: ChatReply, usage: bool) -> bytes:
        """Return a reply as server-sent events (HTML standard, 9.2)."""
        lines = []
        for name, data in self.events(reply, usage):
            head = f"event: {name}\n" if name else ""
            lines.append(f"{head}data: {msgspec.json.encode(data).decode()}\n\n")
        return "".join([*lines, self.last]).encode()
