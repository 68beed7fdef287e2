"""What indexes in other engines share: the chunks to fill them with, the description that they keep, and a retriever
over blocking calls that adds threads, deadlines, faults, grep, and the order of hits."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

from harness1.config import Index, Machine
from harness1.errors import MALFORMED, CorpusError, InfrastructureFault, UsageError
from harness1.plain import digest, secrets_of, utf8_safe, without_password, without_secrets
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.corpus import ANALYSER, Document, chunk
from harness1.retrieval.grep import compile_pattern
from harness1.retrieval.index import document_sum, index_hash, read_description
from harness1.retrieval.pattern import find_literal
from harness1.retrieval.protocol import (
    BadPattern,
    Found,
    IndexInfo,
    RetrievalFault,
    Scored,
    SearchRequest,
    SearchResult,
    total_order,
)

FORMAT = 1
TIES = 10
"""Hits requested beyond k, so that ids, not the engine, break ties at the cut."""
FIRST_STRETCH, LONGEST_STRETCH = 256, 8192
"""Positions that grep requests at a time, doubled after each stretch."""
MODEL_ERRORS = (RuntimeError, ValueError, OSError)
LONGEST_MESSAGE = 300

DEFAULT_COLLECTION = "harness1"

T = TypeVar("T")
Placed = tuple[int, Chunk]
"""A chunk behind its position in corpus order."""
Hits = list[tuple[Chunk, float]]
"""Chunks with scores, higher is better, in any order."""


class Address(NamedTuple):
    """The address of a server, or a file, and the name of an index in it."""

    engine: str
    uri: str
    collection: str

    def __str__(self) -> str:
        return f"{self.engine}:{without_password(self.uri)}#{self.collection}"


FORMS = {
    "chroma": (r"https?://[^/@?\s]+/?", r"[A-Za-z0-9][\w.-]{1,200}[A-Za-z0-9]", "an address http://HOST:8000"),
    "milvus": (r".*\.db|https?://.+", r"[A-Za-z_]\w{0,199}", "a file PATH.db, or an address http://HOST:19530"),
}
"""Patterns of an engine's addresses and of the names of its collections, and what to give."""


def parse_address(engine: str, spec: str) -> Address:
    """Parse `URI` or `URI#COLLECTION`. Raises UsageError: it is something else."""
    uris, names, advice = FORMS[engine]
    uri, _, collection = spec.partition("#")
    if not re.fullmatch(uris, uri):
        raise UsageError(f"{engine}:{without_password(spec)}: give {advice}")
    if collection and not re.fullmatch(names, collection, re.ASCII):
        raise UsageError(f"{collection!r} cannot name a collection of {engine}: it must match {names}")
    return Address(engine, uri, collection or DEFAULT_COLLECTION)


@contextmanager
def reporting(where: Address, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn failures of an engine into InfrastructureFault, while an index is opened or built."""
    try:
        yield
    except errors as error:
        shown = without_secrets(str(error), secrets_of(where.uri))  # which may repeat the whole address
        raise InfrastructureFault(f"{where}: {type(error).__name__}: {shown}") from error


class EngineIndex(Record):
    """The description of an index, which an engine stores when all chunks are in. An index without it is unfinished."""

    format: int
    info: IndexInfo
    settings: Index
    embedder: str = ""
    """Hash of the embedder; empty without embeddings."""
    analyser: str = ""
    """`ANALYSER` of the version that built it, if it had one."""

    @classmethod
    def read(cls, text: object, name: str) -> EngineIndex:
        """Read the description that an engine stored. Raises CorpusError: it is none, or older; SchemaError: newer."""
        try:
            return read_description(str(text), cls, FORMAT, name)
        except MALFORMED as error:
            raise CorpusError(f"{name} is not an index of harness1: choose another name") from error

    def check_count(self, name: str, held: int) -> None:
        """Raise CorpusError if an engine does not hold all chunks."""
        if held != self.info.chunks:
            raise CorpusError(f"{name} holds {held} chunks instead of {self.info.chunks}: build it again")


class ChunkStream:
    """Splits documents into chunks on demand; after the last one, `finish` describes the index."""

    def __init__(self, documents: Iterable[Document], settings: Index) -> None:
        self._documents, self._settings = documents, settings
        self._ids: set[str] = set()
        self._read, self._chunks, self._content_sum = 0, 0, 0

    def batches(self, size: int) -> Iterator[list[Placed]]:
        """Yield the chunks in corpus order, `size` at a time; raise CorpusError if ids are not unique."""
        batch: list[Placed] = []
        for document in self._documents:
            pieces = chunk(document, self._settings.chunk_tokens)
            for name in dict.fromkeys((document.doc_id, *(piece.chunk_id for piece in pieces))):
                if name in self._ids:
                    raise CorpusError(f"two documents, or a document and a chunk of another, have the id {name!r}")
                self._ids.add(name)
            self._content_sum += int.from_bytes(document_sum(document), "big")
            self._read += 1
            batch += enumerate(pieces, self._chunks)
            self._chunks += len(pieces)
            while len(batch) >= size:
                yield batch[:size]
                del batch[:size]
        if batch:
            yield batch

    def finish(self, engine: str, embedder: str, language: str = "") -> EngineIndex:
        """Return the description after the last batch, in any order of documents. Raises CorpusError: none."""
        if not self._read:
            raise CorpusError("the corpus holds no documents")
        name = digest([engine, index_hash(self._content_sum, self._settings, embedder)])
        info = IndexInfo(name, self._settings.unit, self._read, self._chunks, language)
        return EngineIndex(FORMAT, info, self._settings, embedder, ANALYSER)


class SearchEngine(Protocol):
    """Blocking calls of at most `timeout` seconds that fail with `errors` or TimeoutError; texts are valid Unicode."""

    name: str
    info: IndexInfo
    errors: tuple[type[Exception], ...]

    def search(self, query: str, k: int, exclude: Sequence[str], timeout: float) -> Hits:
        """Return up to `k` best chunks, without those in `exclude`."""

    def stretch(self, start: int, stop: int, literal: str, timeout: float) -> list[Chunk]:
        """Return the chunks from `start` to before `stop`, in order; those without `literal` may be left out."""

    def document(self, doc_id: str, timeout: float) -> list[Chunk]:
        """Return all chunks of a document, in any order."""

    def chunks(self, chunk_ids: Sequence[str], timeout: float) -> list[Chunk]:
        """Return the named chunks that exist, in any order."""


class EngineRetriever:
    """A `Retriever` over an engine, for any event loop, with at most `machine.concurrency` calls in flight."""

    def __init__(self, engine: SearchEngine, machine: Machine, secrets: Sequence[str] = ()) -> None:
        self._engine, self._run, self._secrets = engine, machine, secrets
        self.info = engine.info
        self._threads = ThreadPoolExecutor(machine.concurrency, thread_name_prefix=engine.name)

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        return list(await asyncio.gather(*map(self._search, requests)))

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        """Get possible matches from the engine in stretches of the corpus, and match them with RE2."""
        compiled = compile_pattern(pattern)
        if isinstance(compiled, BadPattern):
            return compiled
        end = time.monotonic() + deadline
        literal = find_literal(pattern)
        found: list[Chunk] = []
        start, length = 0, FIRST_STRETCH

        def search(timeout: float) -> None:
            for piece in self._engine.stretch(start, start + length, literal, timeout):
                if time.monotonic() > end:  # texts that were not searched would seem to have no match
                    raise TimeoutError
                if len(found) < limit and compiled.search(f"{piece.title}\n{piece.text}".encode()):
                    found.append(piece)

        while start < self.info.chunks and len(found) < limit:
            if fault := await self._call(search, end - time.monotonic()):
                return fault
            start, length = start + length, min(2 * length, LONGEST_STRETCH)
        return tuple(found)

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

    async def _search(self, request: SearchRequest) -> Found:
        if request.k < 1:
            return SearchResult()
        query, exclude = utf8_safe(request.query), sorted(filter(is_unicode, request.exclude))
        begin, most = time.perf_counter(), request.k + TIES
        try:
            found = await self._call(lambda left: self._engine.search(query, most, exclude, left), request.deadline)
        except MODEL_ERRORS as error:
            return self._fault(error)
        if isinstance(found, RetrievalFault):
            return found
        by_id = {chunk.chunk_id: Scored(chunk, score) for chunk, score in found}
        ranked = total_order(((name, hit.score) for name, hit in by_id.items()), request.k)
        stages = {self._engine.name: (time.perf_counter() - begin) * 1000}
        return SearchResult(tuple(by_id[name] for name, _ in ranked), stage_ms=stages)

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
    return utf8_safe(name) == name
