"""Searches that were asked before are answered from memory: the members of a group begin with the same questions."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.retriever import (
    BadPattern,
    IndexInfo,
    RetrievalFault,
    Retriever,
    SearchRequest,
    SearchResult,
)

_Key: TypeAlias = bytes
_Flight: TypeAlias = "tuple[asyncio.Task[list[SearchResult | RetrievalFault]], int]"
"""A batch of searches under way, and the place of one of them in it."""


class CachingRetriever:
    """`Retriever` that keeps the latest results of searches, by query, k, excluded chunks and settings.

    A search that is equal to one under way waits for it, as long as its own deadline allows. Faults are never kept; who
    waited for a search that failed asks again himself, for another's deadline is not his. Cancelling a caller stops no
    search that others may wait for. It belongs to no event loop.

    Args:
        inner: answers what is not kept, and grep, read and get.
        size: how many results are kept; the one unused for longest goes first.
        settings: whatever else decides a result; equal values have equal representations (`repr`).
    """

    def __init__(self, inner: Retriever, size: int, settings: object) -> None:
        self._inner, self._size = inner, size
        self._settings = repr(settings)
        self._results: OrderedDict[_Key, SearchResult] = OrderedDict()
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
        new = {key: request for key, request, result in asked if result is None and self._flight(key) is None}
        self._launch(new)
        flights = [self._flight(key) for key in keys]
        answers: list[SearchResult | RetrievalFault] = []
        for (key, request, result), flight in zip(asked, flights, strict=True):
            # Of equal requests in one call, the first is the one that asks.
            own = new.pop(key, None) is not None
            answers.append(result or await self._landed(key, request, begin + request.deadline, flight, own))
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
        return flight if flight and flight[0].get_loop() is asyncio.get_running_loop() else None

    def _launch(self, requests: dict[_Key, SearchRequest]) -> None:
        """Ask the inner retriever, in a task of its own, so that no caller's cancellation ends it."""
        if not requests:
            return
        self.misses += len(requests)
        task = asyncio.create_task(self._ask(dict(requests)))
        self._flights |= {key: (task, place) for place, key in enumerate(requests)}
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[list[SearchResult | RetrievalFault]]) -> None:
        self._flights = {key: flight for key, flight in self._flights.items() if flight[0] is not task}
        if not task.cancelled():
            task.exception()  # read here, because all who waited for it may have been cancelled

    async def _ask(self, requests: dict[_Key, SearchRequest]) -> list[SearchResult | RetrievalFault]:
        results = await self._inner.search(list(requests.values()))
        if len(results) != len(requests):
            return [RetrievalFault(f"{len(results)} results for {len(requests)} queries")] * len(requests)
        for key, result in zip(requests, results, strict=True):
            if isinstance(result, SearchResult):
                self._results[key] = result
        while len(self._results) > self._size:
            self._results.popitem(last=False)
        return results

    async def _landed(
        self, key: _Key, request: SearchRequest, end: float, flight: _Flight | None, own: bool
    ) -> SearchResult | RetrievalFault:
        """The answer to a search under way; after the fault of another's search, to an own one."""
        self.waits += not own
        while True:
            if flight is None:
                own = True
                self._launch({key: request})
                flight = self._flights[key]
            task, place = flight
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    result = (await asyncio.shield(task))[place]
            except TimeoutError:
                return RetrievalFault("deadline")
            if own or isinstance(result, SearchResult):
                return result
            if (kept := self._results.get(key)) is not None:
                return kept
            flight = self._flight(key)
