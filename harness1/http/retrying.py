"""The retry policy of all requests over a network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from harness1.errors import InfrastructureFault

if TYPE_CHECKING:
    from tenacity import RetryCallState

LONGEST_WAIT_S = 60.0
"""Limit of the wait that a server asks for."""

Answer = TypeVar("Answer")


class Transient(Exception):
    """A failure that a retry may fix: its reason without secrets, and the wait in seconds that the server asked for."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = min(wait_s or 0.0, LONGEST_WAIT_S)


async def retried(call: Callable[[], Awaitable[Answer]], attempts: int, backoff_s: float) -> Answer:
    """Await a call, and again while it raises `Transient`.

    Between tries, wait `backoff_s` times 2, 4, ... with jitter, on top of the server's own wait, so that its clients do
    not all return at once.

    Raises:
        InfrastructureFault: the call failed `attempts` times.
    """
    from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

    def wait(state: RetryCallState) -> float:
        fault = state.outcome.exception() if state.outcome else None
        asked = fault.wait_s if isinstance(fault, Transient) else 0.0
        return asked + backoff_s * 2.0**state.attempt_number * random.uniform(0.5, 1.0)

    transient, stop = retry_if_exception_type(Transient), stop_after_attempt(attempts)
    try:
        return await AsyncRetrying(sleep=asyncio.sleep, stop=stop, wait=wait, retry=transient, reraise=True)(call)
    except Transient as fault:
        raise InfrastructureFault(f"{fault} ({attempts} attempts)") from fault
