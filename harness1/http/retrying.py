"""The one retry policy of everything that is asked over a network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from harness1.errors import InfrastructureFault

if TYPE_CHECKING:
    from tenacity import RetryCallState

LONGEST_WAIT_S = 60.0
"""However long a server asks to wait."""

Answer = TypeVar("Answer")


class Transient(Exception):
    """A failure that another try may mend.

    Args:
        reason: what went wrong, without secrets.
        wait_s: seconds that the server asks to be left alone.
    """

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = min(wait_s or 0.0, LONGEST_WAIT_S)


async def retried(call: Callable[[], Awaitable[Answer]], attempts: int, backoff_s: float) -> Answer:
    """Await a call, again where it raises `Transient`.

    Between tries it waits `backoff_s` times 2, 4, ... with jitter, on top of what the server asks for: its clients must
    not all come back at once.

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
