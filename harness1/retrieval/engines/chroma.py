"""An index in a Chroma server: built there, and searched by embeddings, since the server has no BM25."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from harness1 import config
from harness1.errors import ConfigError, CorpusError, InfrastructureFault, MissingExtra, UsageError
from harness1.records import Chunk, ChunkId, DocId
from harness1.redaction import without_password
from harness1.retrieval.corpus import Document
from harness1.retrieval.dense.embedder import CachedQueries, Embedder, open_embedder
from harness1.retrieval.engines.chunk_stream import ChunkStream, EngineIndex
from harness1.retrieval.engines.engine import EngineRetriever, Found
from harness1.retrieval.protocol import IndexInfo, Retriever

if TYPE_CHECKING:
    from chromadb import Collection
    from chromadb.api import ClientAPI


DEFAULT_COLLECTION = "harness1"
INDEX = "harness1.index"
"""The metadatum of a finished collection: `EngineIndex` as JSON."""
NOT_FOUND = 404


class Address(NamedTuple):
    """The address of a server, and the name of an index in it."""

    url: str
    collection: str

    def __str__(self) -> str:
        return f"chroma:{self.url}#{self.collection}"

    @property
    def building(self) -> str:
        """The collection that becomes the index when it is finished."""
        return f"{self.collection}-building"


def parse_address(spec: str) -> Address:
    """Read `http://HOST:PORT`, with or without `#COLLECTION`.

    Raises:
        UsageError: it is something else.
    """
    url, _, collection = spec.partition("#")
    if not re.fullmatch(r"https?://[^/@?\s]+/?", url):
        raise UsageError(f"chroma:{without_password(spec)}: give the address of a server, http://HOST:8000")
    if collection and not re.fullmatch(r"[A-Za-z0-9][\w.-]{1,200}[A-Za-z0-9]", collection, re.ASCII):
        raise UsageError(f"{collection!r} is no name for a collection: use 3 or more letters, digits and ._-")
    return Address(url.rstrip("/"), collection or DEFAULT_COLLECTION)


def chroma_errors() -> tuple[type[Exception], ...]:
    """What calls of chromadb raise when they fail, on a client made by `connect`.

    Raises:
        MissingExtra: chromadb is not installed.
    """
    try:
        import httpx
        from chromadb.errors import ChromaError
    except ImportError as error:
        raise MissingExtra("chromadb", "chroma") from error
    return (ChromaError, httpx.HTTPError, ValueError)


@contextmanager
def reporting(where: Address) -> Iterator[None]:
    """Turn failures of Chroma into InfrastructureFault, for steps that a user waits for."""
    try:
        yield
    except chroma_errors() as error:
        raise InfrastructureFault(f"{where}: {type(error).__name__}: {error}") from error


def connect(where: Address, timeout: float) -> ClientAPI:
    """A client whose calls wait at most `timeout` seconds for a part of an answer; safe between threads.

    Raises:
        MissingExtra: chromadb is not installed.
        InfrastructureFault: no Chroma server answers.
    """
    with reporting(where):
        import chromadb
        import httpx
        from chromadb.config import Settings

        # The constructor asks the server and has no time limit, so it comes after a call that has one.
        httpx.get(f"{where.url}/api/v2/heartbeat", timeout=timeout).raise_for_status()
        parts = urlsplit(where.url)
        secure = parts.scheme == "https"
        client: Any = chromadb.HttpClient(
            host=str(parts.hostname),
            port=parts.port or (443 if secure else 8000),
            ssl=secure,
            settings=Settings(anonymized_telemetry=False),
        )
        # Neither time limits nor errors with a type for every status can be had in public.
        session = client._server._session
        session.timeout = httpx.Timeout(timeout)
        session.event_hooks = {"response": [_raise_for_status]}
    made: ClientAPI = client
    return made


def _raise_for_status(response: Any) -> None:
    import httpx

    if response.is_error:
        text = response.read().decode("utf-8", "replace")
        raise httpx.HTTPStatusError(f"{response.status_code} {text}", request=response.request, response=response)


def find_index(client: ClientAPI, where: Address) -> Collection | None:
    """The collection that answers: the one of the name, else a finished one that did not get the name yet."""
    named = _find(client, where.collection)
    if named is not None:
        return named
    left = _find(client, where.building)
    return left if left is not None and INDEX in (left.metadata or {}) else None


def _find(client: ClientAPI, name: str) -> Collection | None:
    try:
        return client.get_collection(name, embedding_function=None)
    except chroma_errors() as error:
        if is_not_found(error):
            return None
        raise


def is_not_found(error: Exception) -> bool:
    """Whether the server says that there is no such collection."""
    return getattr(getattr(error, "response", None), "status_code", None) == NOT_FOUND


def stored(chunk: Chunk, position: int) -> tuple[str, dict[str, str | int]]:
    """A chunk as a document of Chroma, title, line break and text, and its metadata.

    The full text filter stops at U+0000; a text with it is stored once more as it is.
    """
    content = f"{chunk.title}\n{chunk.text}"
    document = content.replace("\0", " ")
    metadata: dict[str, str | int] = {
        "chunk_id": chunk.chunk_id,
        "doc_id": chunk.doc_id,
        "number": chunk.index,
        "position": position,
        "title_length": len(chunk.title),
    }
    return document, metadata if document == content else {**metadata, "content": content}


def chunk_of(document: str, metadata: Mapping[str, Any]) -> Chunk:
    """What was `stored`."""
    content, border = metadata.get("content", document), int(metadata["title_length"])
    return Chunk(
        chunk_id=ChunkId(metadata["chunk_id"]),
        doc_id=DocId(metadata["doc_id"]),
        index=int(metadata["number"]),
        title=content[:border],
        text=content[border + 1 :],
    )


def open_chroma(url: str, config: config.Config) -> Retriever:
    """Open the index at `http://HOST:PORT`, with or without `#COLLECTION`.

    Raises:
        ConfigError: `env.retrieval` asks for a ranking that Chroma does not have.
        CorpusError: there is no finished index under this name, or not all of its chunks are there.
        SchemaError: it was built by a newer version of the package.
        InfrastructureFault: the server failed or cannot be reached.
        MissingExtra: a package is not installed.
    """
    where = parse_address(url)
    _check_ranking(config.env.retrieval)
    client = connect(where, config.machine.call_deadline_s)
    with reporting(where):
        collection = find_index(client, where)
        if collection is None:
            raise CorpusError(f"{where}: there is no finished index of this name: build it with --engine")
        index = _finished_index(collection, where)
        held = collection.count()
    if held != index.info.chunks:
        raise CorpusError(f"{where} holds {held} chunks instead of {index.info.chunks}: build it again")
    embedder = open_embedder(index.settings.dense, config.machine)
    if embedder.hash != index.embedder:
        raise CorpusError(f"{where} was built with another embedding model: set machine.embedder, or build it again")
    queries = CachedQueries(embedder, config.machine.cached_searches)
    return EngineRetriever(ChromaEngine(collection, index, queries), config.machine)


def _check_ranking(retrieval: config.Retrieval) -> None:
    if retrieval.mode in ("bm25", "hybrid"):
        raise ConfigError(f"chroma has no BM25: set env.retrieval.mode to auto or dense, not {retrieval.mode}")
    if retrieval.rerank.on:
        raise ConfigError("env.retrieval.rerank is not available over chroma: set env.retrieval.rerank.on=false")


def _finished_index(collection: Collection, where: Address) -> EngineIndex:
    try:
        index = msgspec.json.decode(str((collection.metadata or {})[INDEX]), type=EngineIndex)
    except (KeyError, msgspec.MsgspecError) as error:
        raise CorpusError(f"{where} is no index of harness1: choose another name") from error
    index.check_format(str(where))
    return index


class ChromaEngine:
    """`Engine` over one collection of Chroma; it is named by an id of its own, so that none can take its place.

    The limit of a call is that of the connection (`connect`): what comes later is given up by the caller.
    """

    name = "chroma"

    def __init__(self, collection: Collection, index: EngineIndex, embedder: Embedder) -> None:
        self.info, self.errors = index.info, chroma_errors()
        self._collection, self._embedder = collection, embedder

    def search(self, queries: Sequence[str], k: int, exclude: Sequence[str], timeout: float) -> list[Found]:
        """By cosine."""
        end = time.monotonic() + timeout
        vectors = self._embedder.embed_queries(queries)
        if time.monotonic() > end:
            raise TimeoutError
        others: Any = {"chunk_id": {"$nin": list(exclude)}} if exclude else None
        found = self._collection.query(
            query_embeddings=vectors,
            n_results=min(k, self.info.chunks),
            where=others,
            include=["documents", "metadatas", "distances"],
        )
        return [
            [
                (chunk_of(document, metadata), 1.0 - distance)
                for document, metadata, distance in zip(*columns, strict=True)
            ]
            for columns in zip(
                found["documents"] or [], found["metadatas"] or [], found["distances"] or [], strict=True
            )
        ]

    def stretch(self, start: int, stop: int, literal: str, timeout: float) -> list[Chunk]:
        within = {"$and": [{"position": {"$gte": start}}, {"position": {"$lt": stop}}]}
        rows = self._rows(where=within, where_document={"$contains": literal} if literal else None)
        return [chunk_of(*row) for row in sorted(rows, key=lambda row: int(row[1]["position"]))]

    def document(self, doc_id: str, timeout: float) -> list[Chunk]:
        return [chunk_of(*row) for row in self._rows(where={"doc_id": doc_id})]

    def chunks(self, chunk_ids: Sequence[str], timeout: float) -> list[Chunk]:
        return [chunk_of(*row) for row in self._rows(ids=list(chunk_ids))]

    def _rows(self, **which: Any) -> list[tuple[str, Any]]:
        """Documents with their metadata."""
        found = self._collection.get(**which, include=["documents", "metadatas"])
        return list(zip(found["documents"] or [], found["metadatas"] or [], strict=True))


BATCH = 256
"""Chunks in one insertion; servers refuse more than some thousands."""


def build_chroma(documents: Iterable[Document], url: str, settings: config.Index, machine: config.Machine) -> IndexInfo:
    """Cut and embed a corpus and put it into a Chroma server, in the place of the index of that name, if there is one.

    Until the end the earlier index answers; then readers that are still open get faults. What an interrupted build
    left behind has another name. The next build removes it, unless it is finished and took the place of the earlier
    index.

    Args:
        url: `http://HOST:PORT`, with or without `#COLLECTION`.

    Raises:
        ConfigError: the settings name no embedding model, or ask for something else than HNSW.
        CorpusError: there are no documents, ids are not unique, or somebody else's collection has the name.
        InfrastructureFault: the server failed or cannot be reached.
        MissingExtra: a package is not installed.
    """
    where = parse_address(url)
    if not settings.dense.model:
        raise ConfigError("chroma has no BM25 and needs embeddings: set index.dense.model")
    if settings.dense.search != "hnsw":
        raise ConfigError(f"chroma searches by HNSW, not {settings.dense.search}: set index.dense.search=hnsw")
    client = connect(where, machine.call_deadline_s)
    embedder = open_embedder(settings.dense, machine)
    with reporting(where):
        _clear(client, where)
        collection = _create(client, where, settings.dense)
        stream = ChunkStream(documents, settings)
        for batch in stream.batches(BATCH):
            pieces = [stored(piece, position) for position, piece in batch]
            collection.add(
                ids=[piece.chunk_id for _, piece in batch],
                documents=[document for document, _ in pieces],
                metadatas=[metadata for _, metadata in pieces],
                embeddings=embedder.embed_documents([f"{piece.title}\n{piece.text}" for _, piece in batch]),
            )
        index = stream.finish("chroma", embedder.hash)
        # From here on it is an index, whichever of the next steps is the last.
        collection.modify(metadata={INDEX: msgspec.json.encode(index).decode()})
        _drop(client, where.collection)
        collection.modify(name=where.collection)
    return index.info


def _clear(client: ClientAPI, where: Address) -> None:
    """Free the name that a collection has while it is built."""
    index = find_index(client, where)
    if index is not None and INDEX not in (index.metadata or {}):
        raise CorpusError(f"{where.collection!r} is there and no index of harness1; name another #COLLECTION")
    if index is not None and index.name == where.building:
        index.modify(name=where.collection)
    else:
        _drop(client, where.building)


def _create(client: ClientAPI, where: Address, dense: config.Dense) -> Collection:
    graph: Any = {
        "space": "cosine",
        "max_neighbors": dense.hnsw_links,
        "ef_construction": dense.hnsw_build,
        "ef_search": dense.hnsw_search,
    }
    return client.create_collection(where.building, configuration={"hnsw": graph}, embedding_function=None)


def _drop(client: ClientAPI, name: str) -> None:
    try:
        client.delete_collection(name)
    except chroma_errors() as error:
        if not is_not_found(error):
            raise
