"""Batches the calls of concurrent episodes: one pass over an index or through a model serves many of them."""

from __future__ import annotations

import asyncio
import atexit
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from threading import Condition, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

IDLE_S = 5.0
"""Idle seconds after which the worker thread ends; the next call starts another."""

CLOSING_S = 10.0
"""Seconds that the process, when it exits, waits for the running batch."""


class Batcher(Generic[Item, Result]):
    """Gathers the items of concurrent calls and hands them to `work` together, in one thread, a batch at a time.

    The first item after an idle time opens a window. The batch starts when the window closes, when it is full, or when
    as many calls wait as the last batch had, so a lone caller does not wait. Items that arrive while a batch runs form
    the next one, which starts at once. A batcher is not tied to an event loop, and its thread does not keep the process
    from exiting.

    Args:
        work: returns one result for each item, in order. Its exceptions go to the callers of that batch only.
        window_s: seconds that the first item waits for others.
        size: most items in a batch; a larger call is split.
    """

    def __init__(self, work: Callable[[list[Item]], Sequence[Result]], window_s: float, size: int) -> None:
        self._work, self._window_s, self._size = work, window_s, size
        self._waiting: deque[tuple[_Call[Item, Result], int]] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._usual = size
        self._closed = False

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """Return the results of the items, in their order. Cancelling withdraws items that no batch has taken yet.

        Raises:
            ValueError: `work` left a result out. Any exception of `work` is raised here as well.
        """
        if not items:
            return []
        call: _Call[Item, Result] = _Call(items)
        with self._changed:
            self._waiting.extend((call, at) for at in range(len(items)))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="batcher", daemon=True)
                self._thread.start()
                # A thread that is killed inside torch takes the whole process down with an abort.
                atexit.register(self._close)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            with self._changed:
                self._waiting = deque(entry for entry in self._waiting if entry[0] is not call)
            raise

    def _run(self) -> None:
        rested = True
        while self._collect(rested):
            self._carry_out(self._take())
            rested = not self._waiting

    def _collect(self, rested: bool) -> bool:
        """Wait until a batch should start; return False after a long idle time."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._waiting or self._closed, IDLE_S)
            if not came or self._closed:
                self._thread = None
                atexit.unregister(self._close)
                return False
            if rested:
                self._changed.wait_for(self._enough, self._window_s)
            return True

    def _close(self) -> None:
        """Let the running batch end when the process exits, and start no other."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(CLOSING_S)

    def _enough(self) -> bool:
        return len(self._waiting) >= self._size or sum(at == 0 for _, at in self._waiting) >= self._usual

    def _take(self) -> list[tuple[_Call[Item, Result], int]]:
        """Take the next items that are still wanted."""
        batch: list[tuple[_Call[Item, Result], int]] = []
        with self._changed:
            while self._waiting and len(batch) < self._size:
                call, at = self._waiting.popleft()
                if not call.future.done():
                    batch.append((call, at))
        return batch

    def _carry_out(self, batch: list[tuple[_Call[Item, Result], int]]) -> None:
        if not batch:
            return
        calls = list(dict.fromkeys(call for call, _ in batch))
        self._usual = len(calls)
        with ExitStack() as stack:
            stack.push(lambda _kind, error, _trace: _passed_on(error, calls))
            results = self._work([call.items[at] for call, at in batch])
            if len(results) != len(batch):
                raise ValueError(f"{len(results)} results for {len(batch)} items")
            for (call, at), result in zip(batch, results, strict=True):
                call.put(at, result)


class _Call(Generic[Item, Result]):
    """The items of one caller, and their results so far."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.future: Future[list[Result]] = Future()
        self._results: dict[int, Result] = {}

    def put(self, at: int, result: Result) -> None:
        self._results[at] = result
        if len(self._results) == len(self.items):
            with suppress(InvalidStateError):  # the caller may have been cancelled meanwhile
                self.future.set_result([self._results[place] for place in range(len(self.items))])


def _passed_on(error: BaseException | None, calls: Sequence[_Call[Item, Result]]) -> bool:
    """Pass an exception, if any, on to the calls, because the thread must not die while callers wait for it."""
    for call in calls if error is not None else ():
        with suppress(InvalidStateError):  # complete, or cancelled
            call.future.set_exception(error)
    return True
