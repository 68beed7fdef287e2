"""Return memory to the system that glibc keeps after it was freed.

Tensors of many sizes that live for seconds leave gaps in the heap: a process that sampled and trained on a processor
held 11.0 GB where it used 4.9, and one that only sampled 5.0 GB where it used 2.7.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress


def return_memory() -> None:
    """Return freed memory to the system (malloc_trim(3)). It takes a second for 2 GB."""
    with suppress(AttributeError, OSError):  # other libraries of C do not need it
        ctypes.CDLL(None).malloc_trim(0)


class MemoryReturns:
    """Returns freed memory at intervals, from a loop that allocates much.

    Args:
        interval_s: seconds between two returns, at least.
    """

    def __init__(self, interval_s: float = 30.0) -> None:
        self._interval_s, self._last = interval_s, time.monotonic()

    def tick(self) -> None:
        """Return freed memory if it is time to; call it on every turn of the loop."""
        if time.monotonic() - self._last >= self._interval_s:
            return_memory()
            self._last = time.monotonic()
