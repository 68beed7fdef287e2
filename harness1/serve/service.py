"""What every service here shares: limits, replies, refusals, and a gate that bounds the work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from harness1.errors import HarnessError
from harness1.records import Record
from harness1.retrieval.wire import Failure

RETRY_AFTER = {"Retry-After": "1"}
ReadBody = Callable[[], Awaitable[bytes]]


class ServiceLimits(Record):
    """What one server takes on. Times are in seconds."""

    body_bytes: int = 4 << 20
    body_s: float = 10.0
    queries: int = 4096
    """In one call: the trainer of Search-R1 asks for its whole batch at once, 2,560 queries by default."""
    hits: int = 50_000
    """In one call: the sum over its queries."""
    running: int = 128
    waiting: int = 1024
    wait_s: float = 30.0
    deadline_s: float = 120.0
    """A later deadline of a client is cut to this."""
    connections: int = 2048


class Reply(Record):
    """A status, a body of JSON, and headers beside the usual ones."""

    status: int
    body: bytes
    headers: dict[str, str] = {}


class Refused(HarnessError):
    """A request that is not carried out; becomes a reply with `{"error": ...}`."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.reply = Reply(status, msgspec.json.encode(Failure(message)), headers or {})


class Gate:
    """Lets so many in at a time and so many wait, for so long; the rest are refused (503)."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._places = asyncio.Semaphore(limits.running)
        self._free = limits.running + limits.waiting
        self._wait_s = limits.wait_s

    async def __aenter__(self) -> None:
        if not self._free:
            raise Refused(503, "too many calls are waiting", RETRY_AFTER)
        self._free -= 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except BaseException as error:
            self._free += 1
            if isinstance(error, TimeoutError):
                raise Refused(503, f"no turn came within {self._wait_s:g} s", RETRY_AFTER) from error
            raise

    async def __aexit__(self, *_: object) -> None:
        self._free += 1
        self._places.release()
