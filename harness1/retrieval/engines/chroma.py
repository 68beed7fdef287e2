"""An index in a Chroma server, searched by embeddings because Chroma has no BM25."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from harness1.config import Config, Index, Machine
from harness1.errors import ConfigError, CorpusError, MissingExtra
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.corpus import Document
from harness1.retrieval.dense import HNSW_BUILD, HNSW_LINKS, HNSW_SEARCH
from harness1.retrieval.engines.engine import (
    Address,
    ChunkStream,
    EngineIndex,
    EngineRetriever,
    Hits,
    parse_address,
    reporting,
)
from harness1.retrieval.models import Embedder, open_embedder, open_queries
from harness1.retrieval.protocol import IndexInfo, Retriever

if TYPE_CHECKING:
    from chromadb import Collection
    from chromadb.api import ClientAPI

INDEX = "harness1.index"
"""Metadata key of a finished collection: `EngineIndex` as JSON."""
UNFINISHED = "-building"
"""Ends the name of a collection until it is finished."""
NOT_FOUND = 404
BATCH = 256
"""Chunks in one insertion; servers refuse more than a few thousand."""


def chroma_errors() -> tuple[type[Exception], ...]:
    """Return the errors of chromadb, on a client made by `connect`; raise MissingExtra without chromadb."""
    try:
        import httpx
        from chromadb.errors import ChromaError
    except ImportError as error:
        raise MissingExtra("chromadb", "chroma") from error
    return (ChromaError, httpx.HTTPError, ValueError)


def connect(where: Address, timeout: float) -> ClientAPI:
    """Return a thread-safe client whose calls wait `timeout` seconds. Raises MissingExtra; InfrastructureFault."""
    with reporting(where, chroma_errors()):
        import chromadb
        import httpx
        from chromadb.config import Settings

        # The constructor calls the server without a time limit, so a call with one goes first.
        httpx.get(where.uri.rstrip("/") + "/api/v2/heartbeat", timeout=timeout).raise_for_status()
        parts = urlsplit(where.uri)
        secure, quiet = parts.scheme == "https", Settings(anonymized_telemetry=False)
        port = parts.port or (443 if secure else 8000)
        client: Any = chromadb.HttpClient(host=str(parts.hostname), port=port, ssl=secure, settings=quiet)

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
    with _if_there():
        return client.get_collection(where.collection, embedding_function=None)
    with _if_there():
        left = client.get_collection(where.collection + UNFINISHED, embedding_function=None)
        return left if INDEX in (left.metadata or {}) else None
    return None


@contextmanager
def _if_there() -> Iterator[None]:
    """Do nothing about a collection that does not exist."""
    try:
        yield
    except chroma_errors() as error:
        if getattr(getattr(error, "response", None), "status_code", None) != NOT_FOUND:
            raise


def to_stored(chunk: Chunk, position: int) -> tuple[str, dict[str, str | int]]:
    """Return a chunk as a document and metadata, which keep what the text filter would not pass: it stops at U+0000."""
    content = f"{chunk.title}\n{chunk.text}"
    document = content.replace("\0", " ")
    metadata: dict[str, str | int] = {"chunk_id": chunk.chunk_id, "doc_id": chunk.doc_id, "number": chunk.index}
    metadata |= {"position": position, "title_length": len(chunk.title)}
    return document, metadata if document == content else {**metadata, "content": content}


def chunk_of(document: str, metadata: Mapping[str, Any]) -> Chunk:
    """Return the chunk that was `to_stored`."""
    content, border = metadata.get("content", document), int(metadata["title_length"])
    ids = ChunkId(metadata["chunk_id"]), DocId(metadata["doc_id"])
    return Chunk(*ids, int(metadata["number"]), content[:border], content[border + 1 :])


def open_chroma(url: str, config: Config) -> Retriever:
    """Open the index at `http://HOST:PORT`, with or without `#COLLECTION`. Raises ConfigError: Chroma lacks the
    ranking; CorpusError: there is no whole index; SchemaError; InfrastructureFault; MissingExtra."""
    where, retrieval = parse_address("chroma", url), config.env.retrieval
    if retrieval.mode in ("bm25", "hybrid"):
        raise ConfigError(f"chroma has no BM25: set env.retrieval.mode to auto or dense, not {retrieval.mode}")
    if retrieval.rerank.on:
        raise ConfigError("env.retrieval.rerank is not available over chroma: set env.retrieval.rerank.on=false")
    client = connect(where, config.machine.call_deadline_s)
    with reporting(where, chroma_errors()):
        collection = find_index(client, where)
        if collection is None:
            raise CorpusError(f"{where}: there is no finished index of this name: build it with --engine")
        index = EngineIndex.read((collection.metadata or {}).get(INDEX), str(where))
        index.check_count(str(where), collection.count())
    queries = open_queries(index.settings.dense, config.machine, index.embedder, str(where))
    return EngineRetriever(ChromaEngine(collection, index, queries), config.machine)


class ChromaEngine:
    """A `SearchEngine` over one collection. Calls have the time limit of the connection (`connect`)."""

    name = "chroma"

    def __init__(self, collection: Collection, index: EngineIndex, embedder: Embedder) -> None:
        self.info, self.errors = index.info, chroma_errors()
        self._collection, self._embedder = collection, embedder

    def search(self, query: str, k: int, exclude: Sequence[str], timeout: float) -> Hits:
        """Rank by cosine similarity."""
        end = time.monotonic() + timeout
        vectors = self._embedder.embed_queries([query])
        if time.monotonic() > end:
            raise TimeoutError
        others: Any = {"chunk_id": {"$nin": list(exclude)}} if exclude else None
        wanted: list[Any] = ["documents", "metadatas", "distances"]
        most = min(k, self.info.chunks)
        found: Any = self._collection.query(query_embeddings=vectors, n_results=most, where=others, include=wanted)
        rows = zip(*(found[name][0] for name in wanted), strict=True)
        return [(chunk_of(document, metadata), 1.0 - distance) for document, metadata, distance in rows]

    def stretch(self, start: int, stop: int, literal: str, timeout: float) -> list[Chunk]:
        within = {"$and": [{"position": {"$gte": start}}, {"position": {"$lt": stop}}]}
        rows = self._rows(where=within, where_document={"$contains": literal} if literal else None)
        return [chunk_of(*row) for row in sorted(rows, key=lambda row: int(row[1]["position"]))]

    def document(self, doc_id: str, timeout: float) -> list[Chunk]:
        return [chunk_of(*row) for row in self._rows(where={"doc_id": doc_id})]

    def chunks(self, chunk_ids: Sequence[str], timeout: float) -> list[Chunk]:
        return [chunk_of(*row) for row in self._rows(ids=list(chunk_ids))]

    def _rows(self, **which: Any) -> list[tuple[str, Any]]:
        found = self._collection.get(**which, include=["documents", "metadatas"])
        return list(zip(found["documents"] or [], found["metadatas"] or [], strict=True))


def build_chroma(documents: Iterable[Document], url: str, settings: Index, machine: Machine) -> IndexInfo:
    """Build an index of a corpus at `http://HOST:PORT`, with or without `#COLLECTION`, replacing an earlier one, which
    answers until the end. An interrupted build leaves a collection of another name, which the next one removes, or
    keeps if it is finished. Raises ConfigError: the settings name no model, or another search than HNSW; CorpusError:
    no documents, repeated ids, or a foreign collection; InfrastructureFault; MissingExtra."""
    where = parse_address("chroma", url)
    if not settings.dense.model:
        raise ConfigError("chroma has no BM25 and needs embeddings: set index.dense.model")
    if settings.dense.search != "hnsw":
        raise ConfigError(f"chroma searches by HNSW, not {settings.dense.search}: set index.dense.search=hnsw")
    client = connect(where, machine.call_deadline_s)
    embedder = open_embedder(settings.dense, machine)
    with reporting(where, chroma_errors()):
        earlier = find_index(client, where)
        if earlier is not None and INDEX not in (earlier.metadata or {}):
            raise CorpusError(f"{where.collection!r} exists and is not an index of harness1; name another #COLLECTION")
        fresh = where.collection + UNFINISHED
        if earlier is not None and earlier.name == fresh:
            earlier.modify(name=where.collection)
        with _if_there():  # what an interrupted build left, unless it was finished
            client.delete_collection(fresh)
        graph: Any = {"space": "cosine", "max_neighbors": HNSW_LINKS, "ef_search": HNSW_SEARCH}
        graph = {"hnsw": graph | {"ef_construction": HNSW_BUILD}}
        collection = client.create_collection(fresh, configuration=graph, embedding_function=None)
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
        with _if_there():
            client.delete_collection(where.collection)
        collection.modify(name=where.collection)
    return index.info
