"""Sends equal searches only once, because the episodes of a group begin with the same queries.

Results are kept in memory, bounded by their number and by their hits. A search that equals one under way waits for it.
Faults are never kept, and a caller whose search failed as part of another's asks again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from harness1.retrieval.protocol import IndexInfo, RetrievalFault, Retriever, SearchRequest, SearchResult

ORDINARY = 16
"""Hits of an ordinary result. The cache keeps at most `size` times as many hits."""
LARGEST = 1024
"""Hits of the longest result that is kept: longer ones would drive out many that are asked more often."""

Answer = SearchResult | RetrievalFault


class CachingRetriever:
    """`Retriever` that remembers searches by query, k, excluded chunks and settings.

    A caller waits for an equal search as long as its own deadline allows. A search goes on while anyone waits for it,
    and is cancelled when the last caller leaves. Instances may be used from several event loops, one after the other.

    Args:
        inner: answers what is not kept, and grep, read and get.
        size: how many ordinary results are kept, or fewer long ones.
        settings: everything else that decides a result, compared by `repr`.

    Attributes:
        hits: searches answered from memory.
        misses: searches passed to the inner retriever.
        waits: searches that waited for an equal one.
    """

    def __init__(self, inner: Retriever, size: int, settings: object) -> None:
        self._inner = inner
        self.grep, self.read, self.get = inner.grep, inner.read, inner.get
        self._settings = repr(settings)
        self._kept = _Kept(size)
        self._flights: dict[bytes, _Flight] = {}
        self.hits = self.misses = self.waits = 0

    @property
    def info(self) -> IndexInfo:
        return self._inner.info

    async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
        """Answer what is kept at once, join what is under way, and ask for the rest together."""
        begin = time.monotonic()
        keys = [self._key(request) for request in requests]
        kept = [self._kept.get(key) for key in keys]
        missing = {key: request for key, request, result in zip(keys, requests, kept, strict=True) if result is None}
        flights = {key: flight for key in missing if (flight := self._under_way(key))}
        own = {key: request for key, request in missing.items() if key not in flights}
        if own:
            flights |= dict.fromkeys(own, self._launch(own))
        waiting = kept.count(None) - len(own)
        self.hits, self.waits = self.hits + len(keys) - kept.count(None), self.waits + waiting
        answers: list[Answer] = []
        with ExitStack() as held:
            for flight in set(flights.values()):
                held.enter_context(flight)
            for key, request, result in zip(keys, requests, kept, strict=True):
                end = begin + request.deadline
                answers.append(result or await self._landed(key, request, end, flights[key], key in own))
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
        self.misses += len(requests)
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

    async def _ask(self, requests: dict[bytes, SearchRequest]) -> list[Answer]:
        answers = await self._inner.search(list(requests.values()))
        if len(answers) != len(requests):
            return [RetrievalFault(f"{len(answers)} results for {len(requests)} queries")] * len(requests)
        for key, answer in zip(requests, answers, strict=True):
            if isinstance(answer, SearchResult):
                self._kept.put(key, answer)
        return answers

    async def _landed(self, key: bytes, request: SearchRequest, end: float, flight: _Flight, own: bool) -> Answer:
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
        if len(result.hits) > LARGEST:
            return
        before = self.results.pop(key, SearchResult())
        self.results[key] = result
        self._hits += len(result.hits) - len(before.hits)
        while len(self.results) > self._size or self._hits > self._size * ORDINARY:
            self._hits -= len(self.results.popitem(last=False)[1].hits)


class _Flight:
    """Searches under way that were asked together. Callers wait within its context; the last to leave cancels it."""

    def __init__(self, task: asyncio.Task[list[Answer]], keys: Iterable[bytes]) -> None:
        self.task = task
        self.places = {key: place for place, key in enumerate(keys)}
        self._waiting = 0

    def __enter__(self) -> None:
        self._waiting += 1

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.task.cancel()
