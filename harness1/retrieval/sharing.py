"""Shares work between concurrent episodes: one pass over an index or through a model serves many calls (`Batcher`), and
equal searches are sent only once (`CachingRetriever`), because the episodes of a group begin with the same queries."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import islice
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from harness1.retrieval.protocol import Found, RetrievalFault, Retriever, SearchRequest, SearchResult

Item = TypeVar("Item")
Result = TypeVar("Result")
_Flight = asyncio.Task[dict[bytes, Found]]
"""Searches under way that were asked together."""

LONGEST = 64
"""Hits of the longest result that is remembered: longer ones would take much memory, and are hardly asked twice."""
BATCH_SIZE, WINDOW_S = 64, 0.002
"""Searches, or judgements, of one batch, and the seconds that the first waits for others."""
CACHED_SEARCHES = 4096
"""Results kept for equal searches of sibling episodes."""
IDLE_S = 5.0
"""Idle seconds after which the worker thread ends; the next call starts another."""
CLOSING_S = 10.0
"""Seconds that the process, when it exits, waits for the running batch."""


class Batcher(Generic[Item, Result]):
    """Gathers the items of concurrent calls and hands them to `work`, which returns one result each, in one thread, at
    most `size` at a time. The first call after an idle time waits `window_s` seconds for others, unless the batch is
    full or as many calls wait as the last batch had; calls that arrive while a batch runs form the next one. Exceptions
    go to the callers of their batch. Not tied to an event loop; the thread does not keep the process from exiting."""

    def __init__(self, work: Callable[[list[Item]], Sequence[Result]], window_s: float, size: int) -> None:
        self._work, self._window_s, self._size = work, window_s, size
        self._waiting: deque[tuple[list[Item], Future[list[Result]]]] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._usual = size
        self._closed = False

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """Return the results of the items, in their order. Cancelling withdraws them, unless a batch has taken them.
        Raises what `work` raises, and ValueError: it left a result out."""
        if not items:
            return []
        future: Future[list[Result]] = Future()
        with self._changed:
            self._waiting.append((list(items), future))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="batcher", daemon=True)
                self._thread.start()
                # A thread that is killed inside torch takes the whole process down with an abort.
                atexit.register(self._close)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(future)
        except BaseException:
            future.cancel()
            with self._changed:
                self._waiting = deque(call for call in self._waiting if call[1] is not future)
            raise

    def _run(self) -> None:
        rested = True
        while (calls := self._collect(rested)) is not None:
            items = [item for some, _ in calls for item in some]
            with ExitStack() as stack:
                stack.push(partial(_pass_on, [future for _, future in calls]))
                results: list[Result] = []
                for start in range(0, len(items), self._size):
                    results += self._work(items[start : start + self._size])
                if len(results) != len(items):
                    raise ValueError(f"{len(results)} results for {len(items)} items")
                left = iter(results)
                for some, future in calls:
                    future.set_result(list(islice(left, len(some))))
            rested = not self._waiting

    def _collect(self, rested: bool) -> list[tuple[list[Item], Future[list[Result]]]] | None:
        """Wait until a batch should start, and return the calls that make it up; None after a long idle time."""

        def is_enough() -> bool:
            return len(self._waiting) >= self._usual or sum(len(items) for items, _ in self._waiting) >= self._size

        with self._changed:
            came = self._changed.wait_for(lambda: self._waiting or self._closed, IDLE_S)
            if not came or self._closed:
                self._thread = None
                atexit.unregister(self._close)
                return None
            if rested:
                self._changed.wait_for(is_enough, self._window_s)
            calls, size = [], 0
            while self._waiting and size < self._size:
                call = self._waiting.popleft()
                if call[1].set_running_or_notify_cancel():
                    calls.append(call)
                    size += len(call[0])
            self._usual = len(calls) or self._usual
            return calls

    def _close(self) -> None:
        """Let the running batch end when the process exits, and start no other."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(CLOSING_S)


def _pass_on(futures: Sequence[Future[Any]], _kind: object, error: BaseException | None, _trace: object) -> bool:
    """Pass an exception, if any, on to the callers, because the thread must not die while they wait for it."""
    for future in futures if error is not None else ():
        future.set_exception(error)
    return True


class CachingRetriever:
    """`Retriever` that remembers the latest `size` results of at most `LONGEST` hits by query, k, excluded chunks and
    settings (their `repr`). Faults are never kept; a caller whose search failed as part of another's asks again. A
    search goes on while anyone waits for it, each as long as its own deadline allows. Usable from several event loops,
    one after the other."""

    def __init__(self, inner: Retriever, size: int, settings: object) -> None:
        self._inner, self.info = inner, inner.info
        self.grep, self.read, self.get = inner.grep, inner.read, inner.get
        self._size, self._settings = size, repr(settings)
        self._kept: OrderedDict[bytes, SearchResult] = OrderedDict()
        self._flights: dict[bytes, _Flight] = {}
        self._waiting: Counter[_Flight] = Counter()

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        """Answer what is kept at once, join what is under way, and ask for the rest together."""
        begin = time.monotonic()
        asked = [(self._key(request), request) for request in requests]
        kept = {key: self._kept[key] for key, _ in asked if key in self._kept}
        for key in kept:
            self._kept.move_to_end(key)
        flights = {key: flight for key, _ in asked if key not in kept and (flight := self._under_way(key))}
        own = {key: request for key, request in asked if key not in kept and key not in flights}
        if own:
            flights |= dict.fromkeys(own, self._launch(own))
        joined = set(flights.values())
        self._waiting.update(joined)
        try:
            return [
                kept.get(key) or await self._land(key, request, begin + request.deadline, flights[key], key in own)
                for key, request in asked
            ]
        finally:
            self._waiting.subtract(joined)
            for flight in joined:
                if not self._waiting[flight]:
                    del self._waiting[flight]
                    flight.cancel()

    def _key(self, request: SearchRequest) -> bytes:
        # A digest, because excluded ids would take more room than results; of a `repr`, which escapes lone surrogates.
        parts = repr((request.query, request.k, sorted(request.exclude), request.about, self._settings))
        return hashlib.blake2b(parts.encode(), digest_size=16).digest()

    def _under_way(self, key: bytes) -> _Flight | None:
        """Return the running search for a key, unless a closed event loop left it behind."""
        flight = self._flights.get(key)
        if flight is None or flight.cancelling() or flight.get_loop() is not asyncio.get_running_loop():
            return None
        return flight

    def _launch(self, requests: dict[bytes, SearchRequest]) -> _Flight:
        """Ask the inner retriever in a task of its own, so that the search can outlive its caller."""

        async def ask() -> dict[bytes, Found]:
            answers = await self._inner.search(list(requests.values()))
            if len(answers) != len(requests):
                answers = [RetrievalFault(f"{len(answers)} results for {len(requests)} queries")] * len(requests)
            for key, answer in zip(requests, answers, strict=True):
                if isinstance(answer, SearchResult) and len(answer.hits) <= LONGEST:
                    self._kept[key] = answer
                    self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
            return dict(zip(requests, answers, strict=True))

        def forget(flight: _Flight) -> None:
            for key in requests:
                if self._flights.get(key) is flight:
                    del self._flights[key]
            if not flight.cancelled():
                flight.exception()  # marks it as seen: every waiting caller may have been cancelled

        flight = asyncio.create_task(ask())
        self._flights |= dict.fromkeys(requests, flight)
        flight.add_done_callback(forget)
        return flight

    async def _land(self, key: bytes, request: SearchRequest, end: float, flight: _Flight, own: bool) -> Found:
        """Return the answer to a search; if it was another caller's and failed, ask again."""
        try:
            async with asyncio.timeout(end - time.monotonic()):
                answer = (await asyncio.shield(flight))[key]
        except TimeoutError:
            return RetrievalFault("deadline")
        if not own and isinstance(answer, RetrievalFault):
            (answer,) = await self.search([replace(request, deadline=end - time.monotonic())])
        return answer
