"""What indexes in other engines share: the chunks to fill them with, the description that they keep, and a retriever
over blocking calls that adds threads, deadlines, faults, grep, and the order of hits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from harness1 import config
from harness1.config import Machine
from harness1.config.env import read_index_description
from harness1.errors import MALFORMED, CorpusError, SchemaError
from harness1.plain import digest, utf8_safe, without_secrets
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.corpus import Document, chunk
from harness1.retrieval.embedder import CachedQueries, open_embedder
from harness1.retrieval.grep import compile_pattern, grep
from harness1.retrieval.index import document_sum, index_hash
from harness1.retrieval.pattern import required_literal
from harness1.retrieval.protocol import (
    BadPattern,
    IndexInfo,
    RetrievalFault,
    Scored,
    SearchRequest,
    SearchResult,
    total_order,
)
from harness1.retrieval.sharing import CACHED_SEARCHES

FORMAT = 1
TIES = 10
"""Hits requested beyond k, so that ids, not the engine, break ties at the cut."""
FIRST_STRETCH, LONGEST_STRETCH = 256, 8192
"""Positions that grep requests at a time, doubled after each stretch."""
MODEL_ERRORS = (RuntimeError, ValueError, OSError)
"""Errors of the model that embeds queries."""
LONGEST_MESSAGE = 300
"""Characters of an engine's error that a fault repeats."""

T = TypeVar("T")
ScoredChunks = list[tuple[Chunk, float]]
"""Chunks with scores, higher is better, in any order."""


class EngineIndex(Record):
    """The description of an index, which an engine stores when all chunks are in. An index without it is unfinished."""

    format: int
    info: IndexInfo
    settings: config.Index
    embedder: str = ""
    """Hash of the embedder; empty without embeddings."""

    @classmethod
    def read(cls, text: object, name: str) -> EngineIndex:
        """Read the description that an engine stored as JSON.

        Raises:
            CorpusError: it is not such a description, or one of an older format.
            SchemaError: it has a newer format.
        """
        try:
            index = read_index_description(str(text), cls)
        except MALFORMED as error:
            raise CorpusError(f"{name} is not an index of harness1: choose another name") from error
        if index.format > FORMAT:
            raise SchemaError(f"{name} has format {index.format}; this harness1 reads up to {FORMAT}: upgrade it")
        if index.format < FORMAT:
            raise CorpusError(f"{name} has the earlier format {index.format}: build it again with harness1 index")
        return index

    def check_count(self, name: str, held: int) -> None:
        """Raise CorpusError if an engine does not hold all chunks."""
        if held != self.info.chunks:
            raise CorpusError(f"{name} holds {held} chunks instead of {self.info.chunks}: build it again")

    def open_queries(self, name: str, machine: config.Machine) -> CachedQueries:
        """Open the embedder of the index; raise CorpusError if the configured model is another one."""
        embedder = open_embedder(self.settings.dense, machine)
        if embedder.hash != self.embedder:
            raise CorpusError(f"{name} was built with another embedding model: set machine.embedder, or build it again")
        return CachedQueries(embedder, CACHED_SEARCHES)


class Placed(NamedTuple):
    """A chunk and its position in corpus order."""

    position: int
    chunk: Chunk


class ChunkStream:
    """Splits documents into chunks on demand; after the last one, `finish` describes the index."""

    def __init__(self, documents: Iterable[Document], settings: config.Index) -> None:
        self._documents, self._settings = documents, settings
        self._ids: set[str] = set()
        self._read, self._chunks, self._content_sum = 0, 0, 0

    def batches(self, size: int) -> Iterator[list[Placed]]:
        """Yield the chunks in corpus order, `size` at a time; raise CorpusError if two documents share an id, or a
        chunk has the id of another document."""
        placed = self._placed()
        while batch := list(islice(placed, size)):
            yield batch

    def finish(self, engine: str, embedder: str, language: str = "") -> EngineIndex:
        """Return the description of the index, after the last batch. The order of documents does not affect its hash.
        Raise CorpusError if there were no documents.

        Args:
            language: of the analyser, as in `IndexInfo`.
        """
        if not self._read:
            raise CorpusError("the corpus holds no documents")
        name = digest([engine, index_hash(self._content_sum, self._settings, embedder, language)])
        info = IndexInfo(name, self._settings.unit, self._read, self._chunks, language)
        return EngineIndex(FORMAT, info, self._settings, embedder)

    def _placed(self) -> Iterator[Placed]:
        for document in self._documents:
            pieces = chunk(document, self._settings.chunk_tokens)
            for name in dict.fromkeys((document.doc_id, *(piece.chunk_id for piece in pieces))):
                if name in self._ids:
                    raise CorpusError(f"two documents, or a document and a chunk of another, have the id {name!r}")
                self._ids.add(name)
            self._content_sum += int.from_bytes(document_sum(document), "big")
            self._read += 1
            for piece in pieces:
                yield Placed(self._chunks, piece)
                self._chunks += 1


class SearchEngine(Protocol):
    """Blocking calls that take at most `timeout` seconds and fail with one of `errors` or TimeoutError.

    All texts that they get are valid Unicode.
    """

    name: str
    info: IndexInfo
    errors: tuple[type[Exception], ...]

    def search(self, queries: Sequence[str], k: int, exclude: Sequence[str], timeout: float) -> list[ScoredChunks]:
        """Return up to `k` best chunks for each query, without those in `exclude`."""
        ...

    def stretch(self, start: int, stop: int, literal: str, timeout: float) -> list[Chunk]:
        """Return the chunks at positions `start` to before `stop`, in order; those without `literal` in title or text
        may be left out."""
        ...

    def document(self, doc_id: str, timeout: float) -> list[Chunk]:
        """Return all chunks of a document, in any order."""
        ...

    def chunks(self, chunk_ids: Sequence[str], timeout: float) -> list[Chunk]:
        """Return the named chunks that exist, in any order."""
        ...


class EngineRetriever:
    """A `Retriever` over an engine, usable from any event loop.

    Args:
        machine: `concurrency` bounds the calls in flight; `call_deadline_s` is the default deadline.
        secrets: what messages must not repeat.
    """

    def __init__(self, engine: SearchEngine, machine: Machine, secrets: Sequence[str] = ()) -> None:
        self._engine, self._run, self._secrets = engine, machine, secrets
        self._threads = ThreadPoolExecutor(machine.concurrency, thread_name_prefix=engine.name)

    @property
    def info(self) -> IndexInfo:
        return self._engine.info

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        """Search in one call of the engine for all requests that differ only in the query."""
        groups: dict[SearchRequest, list[int]] = {}
        for place, request in enumerate(requests):
            alike = replace(request, query="", about="")
            groups.setdefault(alike, []).append(place)
        answers: dict[int, SearchResult | RetrievalFault] = {}
        calls = (self._search(alike, [requests[place].query for place in places]) for alike, places in groups.items())
        for places, results in zip(groups.values(), await asyncio.gather(*calls), strict=True):
            answers |= zip(places, results, strict=True)
        return [answers[place] for place in range(len(requests))]

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        """Get possible matches from the engine in stretches of the corpus, and match them with RE2."""
        compiled = compile_pattern(pattern)
        if isinstance(compiled, BadPattern):
            return compiled
        end = time.monotonic() + deadline
        literal = required_literal(pattern)
        found: list[Chunk] = []
        start, length = 0, FIRST_STRETCH
        while start < self.info.chunks and len(found) < limit:

            def matches(timeout: float, start: int = start, stop: int = start + length) -> list[Chunk] | RetrievalFault:
                chunks = self._engine.stretch(start, stop, literal, timeout)
                texts = (f"{chunk.title}\n{chunk.text}".encode() for chunk in chunks)
                places = grep(texts, pattern, limit, timeout)
                # The pattern was compiled before, so it is valid.
                return [chunks[at] for at in places] if isinstance(places, list) else RetrievalFault("deadline")

            more = await self._call(matches, end - time.monotonic())
            if isinstance(more, RetrievalFault):
                return more
            found += more
            start, length = start + length, min(2 * length, LONGEST_STRETCH)
        return tuple(found[:limit])

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        if not is_unicode(doc_id):
            return ()
        found = await self._call(lambda timeout: self._engine.document(doc_id, timeout), self._run.call_deadline_s)
        return found if isinstance(found, RetrievalFault) else tuple(sorted(found, key=lambda chunk: chunk.index))

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        names = list(dict.fromkeys(filter(is_unicode, chunk_ids)))
        if not names:
            return ()
        found = await self._call(lambda timeout: self._engine.chunks(names, timeout), self._run.call_deadline_s)
        if isinstance(found, RetrievalFault):
            return found
        by_id = {chunk.chunk_id: chunk for chunk in found}
        return tuple(by_id[name] for name in chunk_ids if name in by_id)

    async def _search(self, alike: SearchRequest, queries: list[str]) -> Sequence[SearchResult | RetrievalFault]:
        if alike.k < 1:
            return [SearchResult()] * len(queries)
        clean = [utf8_safe(query) for query in queries]
        exclude = sorted(filter(is_unicode, alike.exclude))
        begin = time.perf_counter()
        try:
            found = await self._call(
                lambda timeout: self._engine.search(clean, alike.k + TIES, exclude, timeout), alike.deadline
            )
        except MODEL_ERRORS as error:
            if len(queries) == 1:
                return [self._fault(error)]
            # A text that the model cannot embed must not fail the others.
            left = replace(alike, deadline=alike.deadline - (time.perf_counter() - begin))
            alone = await asyncio.gather(*(self._search(left, [query]) for query in queries))
            return [answer for (answer,) in alone]
        if isinstance(found, RetrievalFault):
            return [found] * len(queries)
        stages = {self._engine.name: (time.perf_counter() - begin) * 1000}
        results = []
        for each in found:
            by_id = {chunk.chunk_id: (chunk, score) for chunk, score in each}
            ranked = total_order(((name, score) for name, (_, score) in by_id.items()), alike.k)
            results.append(SearchResult(tuple(Scored(*by_id[name]) for name, _ in ranked), stage_ms=stages))
        return results

    async def _call(self, work: Callable[[float], T], deadline: float) -> T | RetrievalFault:
        """Run a blocking call in a thread; the deadline includes the wait for a free thread."""
        end = time.monotonic() + deadline

        def within_deadline() -> T:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            return work(left)

        try:
            async with asyncio.timeout(deadline):
                return await asyncio.get_running_loop().run_in_executor(self._threads, within_deadline)
        except TimeoutError:
            return RetrievalFault("deadline")
        except self._engine.errors as error:
            return self._fault(error)

    def _fault(self, error: Exception) -> RetrievalFault:
        message = f"{self._engine.name}: {type(error).__name__}: {error}"
        return RetrievalFault(without_secrets(message, self._secrets)[:LONGEST_MESSAGE])


def is_unicode(name: str) -> bool:
    """Return True if a name is valid Unicode. Policies can emit lone surrogates, which cannot be sent or stored."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
