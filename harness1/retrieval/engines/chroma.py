"""An index in a Chroma server, searched by embeddings because Chroma has no BM25."""

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
from harness1.plain import without_password
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.corpus import Document
from harness1.retrieval.dense import HNSW_BUILD, HNSW_LINKS, HNSW_SEARCH
from harness1.retrieval.embedder import Embedder, open_embedder
from harness1.retrieval.engines.engine import ChunkStream, EngineIndex, EngineRetriever, ScoredChunks
from harness1.retrieval.protocol import IndexInfo, Retriever

if TYPE_CHECKING:
    from chromadb import Collection
    from chromadb.api import ClientAPI


DEFAULT_COLLECTION = "harness1"
INDEX = "harness1.index"
"""Metadata key of a finished collection: `EngineIndex` as JSON."""
NOT_FOUND = 404
BATCH = 256
"""Chunks in one insertion; servers refuse more than a few thousand."""


class Address(NamedTuple):
    """The address of a server, and the name of an index in it."""

    url: str
    collection: str

    def __str__(self) -> str:
        return f"chroma:{self.url}#{self.collection}"

    @property
    def building(self) -> str:
        """Name of the collection until it is finished."""
        return f"{self.collection}-building"


def parse_address(spec: str) -> Address:
    """Parse `http://HOST:PORT`, with or without `#COLLECTION`; raise UsageError for anything else."""
    url, _, collection = spec.partition("#")
    if not re.fullmatch(r"https?://[^/@?\s]+/?", url):
        raise UsageError(f"chroma:{without_password(spec)}: give the address of a server, http://HOST:8000")
    if collection and not re.fullmatch(r"[A-Za-z0-9][\w.-]{1,200}[A-Za-z0-9]", collection, re.ASCII):
        raise UsageError(f"{collection!r} cannot name a collection: use 3 or more letters, digits and ._-")
    return Address(url.rstrip("/"), collection or DEFAULT_COLLECTION)


def chroma_errors() -> tuple[type[Exception], ...]:
    """Return the errors of chromadb, on a client made by `connect`; raise MissingExtra without chromadb."""
    try:
        import httpx
        from chromadb.errors import ChromaError
    except ImportError as error:
        raise MissingExtra("chromadb", "chroma") from error
    return (ChromaError, httpx.HTTPError, ValueError)


@contextmanager
def reporting(where: Address) -> Iterator[None]:
    """Turn failures of Chroma into InfrastructureFault, while an index is opened or built."""
    try:
        yield
    except chroma_errors() as error:
        raise InfrastructureFault(f"{where}: {type(error).__name__}: {error}") from error


def connect(where: Address, timeout: float) -> ClientAPI:
    """Return a thread-safe client whose calls wait at most `timeout` seconds for each part of an answer.

    Raises:
        MissingExtra: chromadb is not installed.
        InfrastructureFault: no Chroma server answers.
    """
    with reporting(where):
        import chromadb
        import httpx
        from chromadb.config import Settings

        # The constructor calls the server without a time limit, so a call with one goes first.
        httpx.get(f"{where.url}/api/v2/heartbeat", timeout=timeout).raise_for_status()
        parts = urlsplit(where.url)
        secure = parts.scheme == "https"
        client: Any = chromadb.HttpClient(
            host=str(parts.hostname),
            port=parts.port or (443 if secure else 8000),
            ssl=secure,
            settings=Settings(anonymized_telemetry=False),
        )

        def raise_for_status(response: Any) -> None:
            if response.is_error:
                text = f"{response.status_code} {response.read().decode('utf-8', 'replace')}"
                raise httpx.HTTPStatusError(text, request=response.request, response=response)

        # The public interface has neither time limits nor an error type for every status.
        session = client._server._session
        session.timeout = httpx.Timeout(timeout)
        session.event_hooks = {"response": [raise_for_status]}
    made: ClientAPI = client
    return made


def find_index(client: ClientAPI, where: Address) -> Collection | None:
    """Return the collection with the name, or else a finished one that was not renamed yet."""
    if (named := _find(client, where.collection)) is not None:
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
    """Return True if the error says that a collection does not exist."""
    return getattr(getattr(error, "response", None), "status_code", None) == NOT_FOUND


def to_stored(chunk: Chunk, position: int) -> tuple[str, dict[str, str | int]]:
    """Return a chunk as a document of Chroma (title, line break, text) and its metadata.

    Chroma's full text filter stops at U+0000, so such a text is also stored unchanged in the metadata.
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
    """Return the chunk that was `to_stored`."""
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
        ConfigError: Chroma lacks the ranking of `env.retrieval`.
        CorpusError: there is no finished index with this name, or it lacks chunks.
        SchemaError: it was built by a newer version of the package.
        InfrastructureFault: the server failed or cannot be reached.
        MissingExtra: a package is not installed.
    """
    where, retrieval = parse_address(url), config.env.retrieval
    if retrieval.mode in ("bm25", "hybrid"):
        raise ConfigError(f"chroma has no BM25: set env.retrieval.mode to auto or dense, not {retrieval.mode}")
    if retrieval.rerank.on:
        raise ConfigError("env.retrieval.rerank is not available over chroma: set env.retrieval.rerank.on=false")
    client = connect(where, config.machine.call_deadline_s)
    with reporting(where):
        collection = find_index(client, where)
        if collection is None:
            raise CorpusError(f"{where}: there is no finished index of this name: build it with --engine")
        index = EngineIndex.read((collection.metadata or {}).get(INDEX), str(where))
        index.check_count(str(where), collection.count())
    queries = index.open_queries(str(where), config.machine)
    return EngineRetriever(ChromaEngine(collection, index, queries), config.machine)


class ChromaEngine:
    """An `SearchEngine` over one collection, which Chroma identifies by a unique id.

    Calls have the time limit of the connection (`connect`); the caller gives up on later answers.
    """

    name = "chroma"

    def __init__(self, collection: Collection, index: EngineIndex, embedder: Embedder) -> None:
        self.info, self.errors = index.info, chroma_errors()
        self._collection, self._embedder = collection, embedder

    def search(self, queries: Sequence[str], k: int, exclude: Sequence[str], timeout: float) -> list[ScoredChunks]:
        """Rank by cosine similarity."""
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
        lists = zip(found["documents"] or [], found["metadatas"] or [], found["distances"] or [], strict=True)
        return [
            [
                (chunk_of(document, metadata), 1.0 - distance)
                for document, metadata, distance in zip(*columns, strict=True)
            ]
            for columns in lists
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
        """Return documents with their metadata."""
        found = self._collection.get(**which, include=["documents", "metadatas"])
        return list(zip(found["documents"] or [], found["metadatas"] or [], strict=True))


def build_chroma(documents: Iterable[Document], url: str, settings: config.Index, machine: config.Machine) -> IndexInfo:
    """Build an index of a corpus in a Chroma server, replacing an earlier index of that name.

    The earlier index answers until the end; after that, its open readers get faults. An interrupted build leaves a
    collection with another name. The next build removes it, or keeps it as the index if it is finished and the earlier
    one is gone.

    Args:
        url: `http://HOST:PORT`, with or without `#COLLECTION`.

    Raises:
        ConfigError: the settings name no embedding model, or another search than HNSW.
        CorpusError: there are no documents, ids are not unique, or a foreign collection has the name.
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
        earlier = find_index(client, where)
        if earlier is not None and INDEX not in (earlier.metadata or {}):
            raise CorpusError(f"{where.collection!r} exists and is not an index of harness1; name another #COLLECTION")
        if earlier is not None and earlier.name == where.building:
            earlier.modify(name=where.collection)
        else:
            _drop(client, where.building)
        graph: Any = {
            "space": "cosine",
            "max_neighbors": HNSW_LINKS,
            "ef_construction": HNSW_BUILD,
            "ef_search": HNSW_SEARCH,
        }
        collection = client.create_collection(where.building, configuration={"hnsw": graph}, embedding_function=None)
        stream = ChunkStream(documents, settings)
        for batch in stream.batches(BATCH):
            pieces = [to_stored(piece, position) for position, piece in batch]
            collection.add(
                ids=[piece.chunk_id for _, piece in batch],
                documents=[document for document, _ in pieces],
                metadatas=[metadata for _, metadata in pieces],
                embeddings=embedder.embed_documents([f"{piece.title}\n{piece.text}" for _, piece in batch]),
            )
        index = stream.finish("chroma", embedder.hash)
        # From here on it is an index, even if a later step fails.
        collection.modify(metadata={INDEX: msgspec.json.encode(index).decode()})
        _drop(client, where.collection)
        collection.modify(name=where.collection)
    return index.info


def _drop(client: ClientAPI, name: str) -> None:
    try:
        client.delete_collection(name)
    except chroma_errors() as error:
        if not is_not_found(error):
            raise
