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
LARGEST = 1024
"""Hits of the longest result that is kept: longer ones would drive out many that are asked more often."""
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
        """Return the items' results in order; cancelling withdraws. Raises what `work` does, or ValueError: too few."""
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
    (their `repr`). Faults are never kept; a caller whose search failed as part of another's asks again. A search that
    was sent goes on though its callers leave; each waits for its own deadline. For one event loop after another."""

    def __init__(self, inner: Retriever, size: int, settings: object) -> None:
        self._inner, self.info = inner, inner.info
        self.grep, self.read, self.get = inner.grep, inner.read, inner.get
        self._settings = repr(settings)
        self._kept = _Kept(size)
        self._flights: dict[bytes, asyncio.Task[dict[bytes, Found]]] = {}

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        """Answer what is kept at once, join what is under way, and ask for the rest together."""
        begin = time.monotonic()
        keys = [self._key(request) for request in requests]
        kept = [self._kept.get(key) for key in keys]
        missing = {key: request for key, request, result in zip(keys, requests, kept, strict=True) if result is None}
        flights = {key: flight for key in missing if (flight := self._flights.get(key)) and _is_ours(flight)}
        own = {key: request for key, request in missing.items() if key not in flights}
        if own:
            flights |= dict.fromkeys(own, self._launch(own))
        answers: list[Found] = []
        for key, request, result in zip(keys, requests, kept, strict=True):
            end = begin + request.deadline
            answers.append(result or await self._land(key, request, end, flights[key], key in own))
        return answers

    def _key(self, request: SearchRequest) -> bytes:
        # A digest, because excluded ids would take more room than results; of a `repr`, which escapes lone surrogates.
        parts = repr((request.query, request.k, sorted(request.exclude), request.about, self._settings))
        return hashlib.blake2b(parts.encode(), digest_size=16).digest()

    def _launch(self, requests: dict[bytes, SearchRequest]) -> asyncio.Task[dict[bytes, Found]]:
        """Ask the inner retriever in a task of its own, so that the search can outlive its caller."""
        flight = asyncio.create_task(self._ask(dict(requests)))
        self._flights |= dict.fromkeys(requests, flight)
        flight.add_done_callback(lambda _: self._forget(flight, requests))
        return flight

    def _forget(self, flight: asyncio.Task[dict[bytes, Found]], keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._flights.get(key) is flight:
                del self._flights[key]
        if not flight.cancelled():
            flight.exception()  # marks it as seen: every waiting caller may have been cancelled

    async def _ask(self, requests: dict[bytes, SearchRequest]) -> dict[bytes, Found]:
        answers = await self._inner.search(list(requests.values()))
        if len(answers) != len(requests):
            return dict.fromkeys(requests, RetrievalFault(f"{len(answers)} results for {len(requests)} queries"))
        for key, answer in zip(requests, answers, strict=True):
            if isinstance(answer, SearchResult):
                self._kept.put(key, answer)
        return dict(zip(requests, answers, strict=True))

    async def _land(
        self, key: bytes, request: SearchRequest, end: float, flight: asyncio.Task[dict[bytes, Found]], own: bool
    ) -> Found:
        """Return the answer to a search; if it was another caller's and failed, ask again."""
        while True:
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    answer = (await asyncio.shield(flight))[key]
            except TimeoutError:
                return RetrievalFault("deadline")
            if own or isinstance(answer, SearchResult):
                return answer
            if (kept := self._kept.get(key)) is not None:
                return kept
            another = self._flights.get(key)
            own = another is None or not _is_ours(another)
            flight = self._launch({key: request}) if another is None or own else another


def _is_ours(flight: asyncio.Task[dict[bytes, Found]]) -> bool:
    """Return False for a search that a closed event loop left behind, or is ending."""
    return not flight.cancelling() and flight.get_loop() is asyncio.get_running_loop()


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
        if len(result.hits) > LARGEST:
            return
        before = self.results.pop(key, SearchResult())
        self.results[key] = result
        self._hits += len(result.hits) - len(before.hits)
        while len(self.results) > self._size or self._hits > self._size * ORDINARY:
            self._hits -= len(self.results.popitem(last=False)[1].hits)
