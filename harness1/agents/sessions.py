"""The open sessions of agents: who may call the model, how often, and what each has called."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from harness1.config import Agents
from harness1.rows.proxy_record import RecordedCall
from harness1.serve.service import Refused

SETTLE_S = 5.0
"""Seconds that the calls of an ended agent have to end."""
LOOK_S = 0.01
GROUPS = 3
"""Groups of six digits in the name of a session: it is all that keeps agents apart."""


@dataclass
class OpenSession:
    """What a session has called so far."""

    name: str
    calls: list[RecordedCall] = field(default_factory=list)
    begun: int = 0
    at_work: int = 0
    ended: bool = False


class Sessions:
    """Admits the calls of open sessions within their bounds, and collects them; `append` is that of a recorder.

    Args:
        keep: gets every call of an open session.
    """

    def __init__(self, keep: Callable[[RecordedCall], None], bounds: Agents) -> None:
        self._keep, self._bounds = keep, bounds
        self._open: dict[str, OpenSession] = {}

    def start(self) -> OpenSession:
        """Open a session under a name that an API key can carry and that nobody guesses."""
        name = "-".join(["session", *(f"{secrets.randbelow(10**6):06}" for _ in range(GROUPS))])
        self._open[name] = OpenSession(name)
        return self._open[name]

    async def end(self, session: OpenSession) -> tuple[RecordedCall, ...]:
        """Close a session; return its calls, after those in flight have ended. Later ones are refused."""
        session.ended = True
        waited = 0.0
        while session.at_work and waited < SETTLE_S:
            await asyncio.sleep(LOOK_S)
            waited += LOOK_S
        del self._open[session.name]
        return tuple(session.calls)

    @contextmanager
    def admit(self, name: str | None) -> Iterator[None]:
        """Let a call pass, or refuse it: of no open session, of a session with too many calls in all or at once."""
        session = self._open.get(name or "")
        if session is None or session.ended:
            raise Refused(410, "there is no open session of this name: the agent has ended, or gave another API key")
        if session.begun >= self._bounds.calls:
            raise Refused(429, f"a session has at most {self._bounds.calls} calls")
        if session.at_work >= self._bounds.at_once:
            raise Refused(429, f"a session has at most {self._bounds.at_once} calls at once")
        session.begun += 1
        session.at_work += 1
        try:
            yield
        finally:
            session.at_work -= 1

    def append(self, call: RecordedCall) -> None:
        """Keep a call; raise OSError if it cannot be written."""
        self._keep(call)
        if (session := self._open.get(call.session_id)) is not None:
            session.calls.append(call)
