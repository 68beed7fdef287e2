"""Building an index in a Chroma server: embeddings alone, since the server has no BM25."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from harness1 import config
from harness1.errors import ConfigError, CorpusError
from harness1.retrieval.chroma_collection import (
    INDEX,
    Address,
    chroma_errors,
    connect,
    find_index,
    is_not_found,
    parse_address,
    reporting,
    stored,
)
from harness1.retrieval.chunk_stream import ChunkStream
from harness1.retrieval.corpus import Document
from harness1.retrieval.embedder import open_embedder
from harness1.retrieval.retriever import IndexInfo

if TYPE_CHECKING:
    from chromadb import Collection
    from chromadb.api import ClientAPI

BATCH = 256
"""Chunks in one insertion; servers refuse more than some thousands."""


def build_chroma(documents: Iterable[Document], url: str, settings: config.Index, run: config.Run) -> IndexInfo:
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
    client = connect(where, run.call_deadline_s)
    embedder = open_embedder(settings.dense, run)
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
