"""Searches that were asked before are answered from memory: the members of a group begin with the same questions."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TypeAlias

from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, Retriever, SearchRequest, SearchResult

ORDINARY = 16
"""Hits of an ordinary result: so many times the number of results are kept in all."""
LARGEST = 1024
"""Hits of the longest result that is kept: one that is longer would drive out many that are asked more often."""

_Key: TypeAlias = bytes
_Results: TypeAlias = list[SearchResult | RetrievalFault]


class CachingRetriever:
    """`Retriever` that keeps the latest results of searches, by query, k, excluded chunks and settings.

    A search that is equal to one under way waits for it, as long as its own deadline allows. Faults are never kept; who
    waited for a search that failed asks again himself, for another's deadline is not his. A search goes on as long as
    somebody waits for it, and is cancelled when the last one has gone. It belongs to no event loop.

    Args:
        inner: answers what is not kept, and grep, read and get.
        size: how many ordinary results are kept, fewer long ones; the one unused for longest goes first.
        settings: whatever else decides a result; equal values have equal representations (`repr`).
    """

    def __init__(self, inner: Retriever, size: int, settings: object) -> None:
        self._inner, self._size = inner, size
        self._settings = repr(settings)
        self._results: OrderedDict[_Key, SearchResult] = OrderedDict()
        self._kept_hits = 0
        self._flights: dict[_Key, _Flight] = {}
        self.hits = 0
        """Searches answered from memory."""
        self.misses = 0
        """Searches that the inner retriever was asked."""
        self.waits = 0
        """Searches that waited for an equal one under way."""

    @property
    def info(self) -> IndexInfo:
        return self._inner.info

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        """Answer what is known at once, ask for the rest together."""
        begin = time.monotonic()
        keys = [self._key(request) for request in requests]
        known = [self._known(key) for key in keys]
        asked = list(zip(keys, requests, known, strict=True))
        missing = {key: request for key, request, result in asked if result is None}
        flights = {key: flight for key in missing if (flight := self._flight(key))}
        new = {key: request for key, request in missing.items() if key not in flights}
        if new:
            flights |= dict.fromkeys(new, self._launch(new))
        answers: list[SearchResult | RetrievalFault] = []
        with ExitStack() as waiting:
            for flight in set(flights.values()):
                waiting.enter_context(flight)
            for key, request, result in asked:
                # Of equal requests in one call, the first is the one that asks.
                own = new.pop(key, None) is not None
                answers.append(result or await self._landed(key, request, begin + request.deadline, flights[key], own))
        return answers

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        return await self._inner.grep(pattern, limit, deadline)

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        return await self._inner.read(doc_id)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        return await self._inner.get(chunk_ids)

    def _key(self, request: SearchRequest) -> _Key:
        """A digest: thousands of sets of hundreds of ids would outweigh the results."""
        # A representation escapes what cannot be encoded, and keeps apart what differs.
        parts = repr((request.query, request.k, sorted(request.exclude), self._settings))
        return hashlib.blake2b(parts.encode(), digest_size=16).digest()

    def _known(self, key: _Key) -> SearchResult | None:
        result = self._results.get(key)
        if result is not None:
            self._results.move_to_end(key)
            self.hits += 1
        return result

    def _flight(self, key: _Key) -> _Flight | None:
        """The search under way on this event loop; one that another loop left behind when it was closed never ends."""
        flight = self._flights.get(key)
        if flight is None or flight.task.cancelling() or flight.task.get_loop() is not asyncio.get_running_loop():
            return None
        return flight

    def _launch(self, requests: dict[_Key, SearchRequest]) -> _Flight:
        """Ask the inner retriever, in a task of its own, so that the search need not end with the caller."""
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
            flight.task.exception()  # read here, because all who waited for it may have been cancelled

    async def _ask(self, requests: dict[_Key, SearchRequest]) -> _Results:
        results = await self._inner.search(list(requests.values()))
        if len(results) != len(requests):
            return [RetrievalFault(f"{len(results)} results for {len(requests)} queries")] * len(requests)
        for key, result in zip(requests, results, strict=True):
            if isinstance(result, SearchResult) and len(result.hits) <= LARGEST:
                self._keep(key, result)
        return results

    def _keep(self, key: _Key, result: SearchResult) -> None:
        before = self._results.pop(key, SearchResult())
        self._results[key] = result
        self._kept_hits += len(result.hits) - len(before.hits)
        while len(self._results) > self._size or self._kept_hits > self._size * ORDINARY:
            _, unused = self._results.popitem(last=False)
            self._kept_hits -= len(unused.hits)

    async def _landed(
        self, key: _Key, request: SearchRequest, end: float, flight: _Flight, own: bool
    ) -> SearchResult | RetrievalFault:
        """The answer to a search under way; after the fault of another's search, to an own one."""
        self.waits += not own
        while True:
            try:
                with flight:
                    async with asyncio.timeout(end - time.monotonic()):
                        result = (await asyncio.shield(flight.task))[flight.places[key]]
            except TimeoutError:
                return RetrievalFault("deadline")
            if own or isinstance(result, SearchResult):
                return result
            if (kept := self._results.get(key)) is not None:
                return kept
            another = self._flight(key)
            own = another is None
            flight = another or self._launch({key: request})


class _Flight:
    """A batch of searches under way. Callers that wait for it are within its context; the last to leave cancels it."""

    def __init__(self, task: asyncio.Task[_Results], keys: Iterable[_Key]) -> None:
        self.task = task
        self.places = {key: place for place, key in enumerate(keys)}
        self._waiting = 0

    def __enter__(self) -> None:
        self._waiting += 1

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.task.cancel()
