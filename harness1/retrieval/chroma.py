"""Searching an index in a Chroma server, by embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from harness1 import config
from harness1.errors import ConfigError, CorpusError
from harness1.records import Chunk
from harness1.retrieval.chroma_collection import (
    INDEX,
    Address,
    chroma_errors,
    chunk_of,
    connect,
    find_index,
    parse_address,
    reporting,
)
from harness1.retrieval.chunk_stream import EngineIndex
from harness1.retrieval.embedder import CachedQueries, Embedder, open_embedder
from harness1.retrieval.engine import EngineRetriever, Found
from harness1.retrieval.retriever import Retriever

if TYPE_CHECKING:
    from chromadb import Collection


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
    client = connect(where, config.run.call_deadline_s)
    with reporting(where):
        collection = find_index(client, where)
        if collection is None:
            raise CorpusError(f"{where}: there is no finished index of this name: build it with --engine")
        index = _finished_index(collection, where)
        held = collection.count()
    if held != index.info.chunks:
        raise CorpusError(f"{where} holds {held} chunks instead of {index.info.chunks}: build it again")
    embedder = open_embedder(index.settings.dense, config.run)
    if embedder.hash != index.embedder:
        raise CorpusError(f"{where} was built with another embedding model: set run.embedder, or build it again")
    queries = CachedQueries(embedder, config.run.cached_searches)
    return EngineRetriever(ChromaEngine(collection, index, queries), config.run)


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
