"""Replayed episodes on disk, from which those that fit into a file are chosen."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import IO, TypeVar

from harness1.errors import InfrastructureFault

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 2
"""Items in progress per worker: enough to keep it busy, and a bound on memory."""


Place = tuple[int, int]
"""Offset and size in bytes."""


class Spool:
    """Bytes in a temporary file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def put(self, data: bytes) -> Place:
        """Store some bytes and return their place."""
        offset = self._file.seek(0, os.SEEK_END)
        return offset, self._file.write(data)

    def get(self, offset: int, size: int) -> bytes:
        """Return the bytes at a place."""
        self._file.seek(offset)
        return self._file.read(size)


def mapped(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yield the results of a pure function in the order of the items, with a bounded number in progress; raise
    InfrastructureFault if a worker process died."""
    if workers <= 1:
        yield from map(work, items)
        return
    waiting: deque[Future[Result]] = deque()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise InfrastructureFault("a worker process died while episodes were replayed") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
