"""Building an index in Milvus, for BM25 by its full text search and, with a model, for embeddings.

The analysed field holds the terms of a chunk from our own analyser, separated by spaces, so that terms are the same in
every version of Milvus and in the embedded index. Milvus only counts and scores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import isqrt
from typing import TYPE_CHECKING, Any

import msgspec

from harness1 import config
from harness1.errors import CorpusError, UsageError
from harness1.retrieval.analyser import Analyser, reads_by_script
from harness1.retrieval.corpus import Document, searched_text
from harness1.retrieval.dense.embedder import Embedder, open_embedder
from harness1.retrieval.engines.chunk_stream import ChunkStream, Placed
from harness1.retrieval.engines.milvus import (
    ANALYSED,
    DENSE,
    PROPERTY,
    SPARSE,
    Address,
    analysed,
    connect,
    parse_address,
    reporting,
)
from harness1.retrieval.protocol import IndexInfo
from harness1.words import AUTO, is_foreign

if TYPE_CHECKING:
    from pymilvus import CollectionSchema, MilvusClient
    from pymilvus.milvus_client.index import IndexParams

BATCH = 256
"""Chunks in one insertion."""
LONGEST = 65_535
"""Limit of a VARCHAR field in bytes."""


def build_milvus(documents: Iterable[Document], uri: str, settings: config.Index, machine: config.Machine) -> IndexInfo:
    """Build an index of a corpus in Milvus, replacing an earlier index of that name.

    The earlier index answers until the last step; after that, its open readers get faults. An interrupted build is
    never opened, and the next build removes it.

    Args:
        uri: `PATH.db` or `http://HOST:PORT`, with or without `#COLLECTION`.

    Raises:
        CorpusError: there are no documents, ids are not unique, or a chunk is too long for Milvus.
        UsageError: the name belongs to a foreign collection, or the file cannot be opened.
        InfrastructureFault: Milvus failed or cannot be reached.
        MissingExtra: a package is not installed.
    """
    where = parse_address(uri)
    embedder = open_embedder(settings.dense, machine) if settings.dense.model else None
    client = connect(where, machine.call_deadline_s)
    try:
        with reporting(where):
            earlier = _earlier(client, where)
            fresh, stream = where.fresh(), ChunkStream(documents, settings)
            client.create_collection(fresh, schema=_schema(embedder))
            batches = stream.batches(BATCH)
            first = next(batches, [])
            analyser = Analyser(_language(settings, first))
            for batch in chain([first], batches):
                client.insert(fresh, _rows(batch, analyser, embedder), timeout=machine.call_deadline_s)
            index = stream.finish("milvus", embedder.hash if embedder else "", analyser.language)
            client.flush(fresh)
            client.create_index(fresh, _index_params(client, settings, index.info.chunks))
            client.load_collection(fresh)
            client.alter_collection_properties(fresh, {PROPERTY: msgspec.json.encode(index).decode()})
            _publish(client, where, fresh, earlier)
    finally:
        client.close()
    return index.info


def _earlier(client: MilvusClient, where: Address) -> str | None:
    """Drop the collections of unfinished builds, and return the present index, if any."""
    aliases = client.list_aliases()["aliases"]
    current = client.describe_alias(where.collection)["collection_name"] if where.collection in aliases else None
    names = client.list_collections()
    if where.collection in names:
        raise UsageError(f"{where}: this collection was not made by harness1 index: choose another name")
    for name in names:
        if where.is_build(name) and name != current:
            client.drop_collection(name)
    return current


def _publish(client: MilvusClient, where: Address, fresh: str, earlier: str | None) -> None:
    if earlier is None:
        client.create_alias(fresh, where.collection)
    else:
        client.alter_alias(fresh, where.collection)
        client.drop_collection(earlier)


def _language(settings: config.Index, first: Sequence[Placed]) -> str:
    """Return the language of the analyser. What `auto` means is decided by the first batch, because an engine cannot
    change its mind."""
    if settings.language != AUTO:
        return settings.language
    foreign = sum(is_foreign(searched_text(piece)) for _, piece in first)
    return AUTO if reads_by_script(foreign, len(first)) else ""


def _schema(embedder: Embedder | None) -> CollectionSchema:
    from pymilvus import DataType, Function, FunctionType, MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    for name in ("chunk_id", "doc_id", "title", "text"):
        schema.add_field(name, DataType.VARCHAR, max_length=LONGEST, is_primary=name == "chunk_id")
    schema.add_field("number", DataType.INT64)
    schema.add_field("position", DataType.INT64)
    schema.add_field(
        ANALYSED,
        DataType.VARCHAR,
        max_length=LONGEST,
        enable_analyzer=True,
        analyzer_params={"tokenizer": "standard"},
    )
    schema.add_field(SPARSE, DataType.SPARSE_FLOAT_VECTOR)
    schema.add_function(Function(SPARSE, FunctionType.BM25, [ANALYSED], [SPARSE]))
    if embedder:
        schema.add_field(DENSE, DataType.FLOAT_VECTOR, dim=embedder.dimensions)
    return schema


def _index_params(client: MilvusClient, settings: config.Index, chunks: int) -> IndexParams:
    params = client.prepare_index_params()
    weights = {"bm25_k1": settings.k1, "bm25_b": settings.b}
    params.add_index(SPARSE, index_type="SPARSE_INVERTED_INDEX", metric_type="BM25", params=weights)
    if settings.dense.model:
        kind, options = _dense_index(settings.dense, chunks)
        params.add_index(DENSE, index_type=kind, metric_type="IP", params=options)
    return params


def _dense_index(dense: config.Dense, chunks: int) -> tuple[str, dict[str, int]]:
    match dense.search:
        case "exact":
            return "FLAT", {}
        case "hnsw":
            return "HNSW", {"M": dense.hnsw_links, "efConstruction": dense.hnsw_build}
        case "ivf":
            return "IVF_FLAT", {"nlist": dense.ivf_lists or max(1, min(4 * isqrt(chunks), chunks, LONGEST))}


def _rows(batch: Sequence[Placed], analyser: Analyser, embedder: Embedder | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for position, piece in batch:
        texts = {
            "chunk_id": piece.chunk_id,
            "doc_id": piece.doc_id,
            "title": piece.title,
            "text": piece.text,
            ANALYSED: analysed(searched_text(piece), analyser),
        }
        for field, value in texts.items():
            if len(value.encode()) > LONGEST:
                raise CorpusError(
                    f"chunk {piece.chunk_id[:80]!r}: its {field} exceeds the limit of Milvus, {LONGEST} bytes; "
                    "lower index.chunk_tokens"
                )
        rows.append({**texts, "number": piece.index, "position": position})
    if embedder:
        vectors = embedder.embed_documents([f"{piece.title}\n{piece.text}" for _, piece in batch])
        for row, vector in zip(rows, vectors, strict=True):
            row[DENSE] = vector
    return rows
