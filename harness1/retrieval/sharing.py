"""Shares work between concurrent episodes: one pass over an index or through a model serves many calls (`Batcher`), and
equal searches are sent only once (`CachingRetriever`), because the episodes of a group begin with the same queries."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import chain, repeat
from threading import Condition, Thread
from typing import Generic, TypeVar

from harness1.retrieval.protocol import Found, RetrievalFault, Retriever, SearchRequest, SearchResult

Item = TypeVar("Item")
Result = TypeVar("Result")

ORDINARY = 16
"""Hits of an ordinary result. The cache keeps at most `size` times as many hits."""
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
    most `size` at a time. The first item after an idle time waits `window_s` seconds for others, unless the batch is
    full or as many calls wait as the last batch had; items that arrive while a batch runs form the next one. Exceptions
    go to the callers of their batch. Not tied to an event loop; the thread does not keep the process from exiting."""

    def __init__(self, work: Callable[[list[Item]], Sequence[Result]], window_s: float, size: int) -> None:
        self._work, self._window_s, self._size = work, window_s, size
        self._waiting: deque[tuple[Item, Future[Result], bool]] = deque()
        """Items, their results, and whether they are the first of their calls."""
        self._changed = Condition()
        self._thread: Thread | None = None
        self._usual = size
        self._closed = False

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """Return the results of the items, in their order. Cancelling withdraws items that no batch has taken yet.
        Raises what `work` raises, and ValueError: it left a result out."""
        futures: list[Future[Result]] = [Future() for _ in items]
        if not futures:
            return []
        with self._changed:
            firsts = chain([True], repeat(False))
            self._waiting.extend(zip(items, futures, firsts, strict=False))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="batcher", daemon=True)
                self._thread.start()
                # A thread that is killed inside torch takes the whole process down with an abort.
                atexit.register(self._close)
            self._changed.notify()
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, futures))
        except BaseException:
            for future in futures:
                future.cancel()
            with self._changed:
                self._waiting = deque(entry for entry in self._waiting if not entry[1].cancelled())
            raise

    def _run(self) -> None:
        rested = True
        while self._collect(rested):
            batch: list[tuple[Item, Future[Result], bool]] = []
            with self._changed:
                while self._waiting and len(batch) < self._size:
                    entry = self._waiting.popleft()
                    if entry[1].set_running_or_notify_cancel():
                        batch.append(entry)
            if batch:
                self._usual = max(1, sum(is_first for *_, is_first in batch))
                futures = [future for _, future, _ in batch]
                with ExitStack() as stack:
                    stack.push(lambda _kind, error, _trace, futures=futures: _pass_on(error, futures))
                    results = self._work([item for item, *_ in batch])
                    if len(results) != len(batch):
                        raise ValueError(f"{len(results)} results for {len(batch)} items")
                    for future, result in zip(futures, results, strict=True):
                        future.set_result(result)
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
                self._changed.wait_for(self._is_enough, self._window_s)
            return True

    def _is_enough(self) -> bool:
        return len(self._waiting) >= self._size or sum(entry[2] for entry in self._waiting) >= self._usual

    def _close(self) -> None:
        """Let the running batch end when the process exits, and start no other."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(CLOSING_S)


def _pass_on(error: BaseException | None, futures: Sequence[Future[Result]]) -> bool:
    """Pass an exception, if any, on to the callers, because the thread must not die while they wait for it."""
    for future in futures if error is not None else ():
        future.set_exception(error)
    return True


class CachingRetriever:
    """`Retriever` that remembers `size` ordinary results, or fewer long ones, by query, k, excluded chunks and settings
    (their `repr`). Faults are never kept; a caller whose search failed as part of another's asks again. A search goes
    on while anyone waits for it, each as long as its own deadline allows. Usable from several event loops, one after
    the other."""

    def __init__(self, inner: Retriever, size: int, settings: object) -> None:
        self._inner, self.info = inner, inner.info
        self.grep, self.read, self.get = inner.grep, inner.read, inner.get
        self._settings = repr(settings)
        self._kept = _Kept(size)
        self._flights: dict[bytes, _Flight] = {}

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        """Answer what is kept at once, join what is under way, and ask for the rest together."""
        begin = time.monotonic()
        keys = [self._key(request) for request in requests]
        kept = [self._kept.get(key) for key in keys]
        missing = {key: request for key, request, result in zip(keys, requests, kept, strict=True) if result is None}
        flights = {key: flight for key in missing if (flight := self._under_way(key))}
        own = {key: request for key, request in missing.items() if key not in flights}
        if own:
            flights |= dict.fromkeys(own, self._launch(own))
        answers: list[Found] = []
        with ExitStack() as held:
            for flight in set(flights.values()):
                held.enter_context(flight)
            for key, request, result in zip(keys, requests, kept, strict=True):
                end = begin + request.deadline
                answers.append(result or await self._land(key, request, end, flights[key], key in own))
        return answers

    def _key(self, request: SearchRequest) -> bytes:
        # A digest, because excluded ids would take more room than results; of a `repr`, which escapes lone surrogates.
        parts = repr((request.query, request.k, sorted(request.exclude), request.about, self._settings))
        return hashlib.blake2b(parts.encode(), digest_size=16).digest()

    def _under_way(self, key: bytes) -> _Flight | None:
        """Return the running search for a key, unless a closed event loop left it behind."""
        flight = self._flights.get(key)
        if flight is None or flight.task.cancelling() or flight.task.get_loop() is not asyncio.get_running_loop():
            return None
        return flight

    def _launch(self, requests: dict[bytes, SearchRequest]) -> _Flight:
        """Ask the inner retriever in a task of its own, so that the search can outlive its caller."""
        flight = _Flight(asyncio.create_task(self._ask(dict(requests))), requests)
        self._flights |= dict.fromkeys(requests, flight)
        flight.task.add_done_callback(lambda _: self._forget(flight))
        return flight

    def _forget(self, flight: _Flight) -> None:
        for key in flight.places:
            if self._flights.get(key) is flight:
                del self._flights[key]
        if not flight.task.cancelled():
            flight.task.exception()  # marks it as seen: every waiting caller may have been cancelled

    async def _ask(self, requests: dict[bytes, SearchRequest]) -> list[Found]:
        answers = await self._inner.search(list(requests.values()))
        if len(answers) != len(requests):
            return [RetrievalFault(f"{len(answers)} results for {len(requests)} queries")] * len(requests)
        for key, answer in zip(requests, answers, strict=True):
            if isinstance(answer, SearchResult):
                self._kept.put(key, answer)
        return answers

    async def _land(self, key: bytes, request: SearchRequest, end: float, flight: _Flight, own: bool) -> Found:
        """Return the answer to a search; if it was another caller's and failed, ask again."""
        while True:
            try:
                with flight:
                    async with asyncio.timeout(end - time.monotonic()):
                        answer = (await asyncio.shield(flight.task))[flight.places[key]]
            except TimeoutError:
                return RetrievalFault("deadline")
            if own or isinstance(answer, SearchResult):
                return answer
            if (kept := self._kept.get(key)) is not None:
                return kept
            another = self._under_way(key)
            own = another is None
            flight = another or self._launch({key: request})


class _Kept:
    """The latest results, bounded by their number and their hits; the least recently used is dropped first."""

    def __init__(self, size: int) -> None:
        self.results: OrderedDict[bytes, SearchResult] = OrderedDict()
        self._size, self._hits = size, 0

    def get(self, key: bytes) -> SearchResult | None:
        if key in self.results:
            self.results.move_to_end(key)
        return self.results.get(key)

    def put(self, key: bytes, result: SearchResult) -> None:
        before = self.results.pop(key, SearchResult())
        self.results[key] = result
        self._hits += len(result.hits) - len(before.hits)
        while len(self.results) > self._size or self._hits > self._size * ORDINARY:
            self._hits -= len(self.results.popitem(last=False)[1].hits)


class _Flight:
    """Searches under way that were asked together. Callers wait within its context; the last to leave cancels it."""

    def __init__(self, task: asyncio.Task[list[Found]], keys: Iterable[bytes]) -> None:
        self.task = task
        self.places = {key: place for place, key in enumerate(keys)}
        self._waiting = 0

    def __enter__(self) -> None:
        self._waiting += 1

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.task.cancel()
