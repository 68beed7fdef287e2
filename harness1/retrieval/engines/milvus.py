"""An index in Milvus, on a server or in a file, searched by BM25, embeddings, or both with Milvus' fusion.

The analysed field holds the terms of our own analyser, so that they are the same in every version of Milvus."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from harness1.config import Config, Index, Machine
from harness1.errors import ConfigError, CorpusError, MissingExtra, UsageError
from harness1.plain import secrets_of
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.bm25 import K1, B
from harness1.retrieval.corpus import Analyser, Document, join_text
from harness1.retrieval.dense import HNSW_BUILD, HNSW_LINKS, HNSW_SEARCH
from harness1.retrieval.engines.engine import (
    Address,
    ChunkStream,
    EngineIndex,
    EngineRetriever,
    Hits,
    Placed,
    parse_address,
    reporting,
)
from harness1.retrieval.index import check_terms
from harness1.retrieval.models import Embedder, open_embedder, open_queries
from harness1.retrieval.protocol import BM25_DEPTH, DENSE_DEPTH, RRF_K, IndexInfo, Mode, Retriever, ranking_mode

if TYPE_CHECKING:
    from pymilvus import CollectionSchema, MilvusClient

PROPERTY = "harness1.index"
ANALYSED, SPARSE, DENSE = "terms", "bm25", "embedding"
TEXTS = ("chunk_id", "doc_id", "title", "text")
STORED = [*TEXTS, "number"]
MOST = 16_384
"""Limit of Milvus on the hits of a query."""
LONGEST = 65_535
"""Limit of a VARCHAR field in bytes."""
BATCH = 256
NO_TERM = "0"
"""Search term of a query without terms. Terms of ASCII have at least two characters, so it matches nothing."""


def milvus_errors() -> tuple[type[Exception], ...]:
    """Return the errors of pymilvus; raise MissingExtra without it."""
    try:
        import grpc
        from pymilvus import MilvusException
    except ImportError as error:
        raise MissingExtra("pymilvus", "milvus") from error
    return (MilvusException, grpc.RpcError)


def connect(where: Address, timeout: float) -> MilvusClient:
    """Return a thread-safe client. Raises MissingExtra; UsageError: the file is in use; InfrastructureFault."""
    errors, is_file = milvus_errors(), where.uri.endswith(".db")
    from pymilvus import MilvusClient

    if is_file:
        try:
            import milvus_lite  # noqa: F401  (pymilvus starts it)
        except ImportError as error:
            raise MissingExtra("milvus-lite", "milvus") from error
        Path(where.uri).parent.mkdir(parents=True, exist_ok=True)
    # Failures are raised; pymilvus would also log a traceback for each.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    with reporting(where, errors):
        try:
            return MilvusClient(uri=where.uri, timeout=timeout)
        except errors as error:
            if is_file:
                raise UsageError(f"{where.uri} cannot be opened; one process at a time may have it open") from error
            raise


def quote(text: str) -> str:
    """Return a string literal for Milvus' filter expressions."""
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


def chunk_of(row: dict[str, Any]) -> Chunk:
    """Return a chunk from its stored fields."""
    return Chunk(ChunkId(row["chunk_id"]), DocId(row["doc_id"]), int(row["number"]), row["title"], row["text"])


def join_terms(terms: Iterable[str]) -> str:
    """Return terms as one text. Those of more than ASCII letters and digits, which Milvus would cut, are in hex."""
    return " ".join(
        term if term.isascii() and term.isalnum() else f"u{term.encode('utf-8', 'surrogatepass').hex()}"
        for term in terms
    )


def open_milvus(uri: str, config: Config) -> Retriever:
    """Open the index at `PATH.db` or `http://HOST:PORT`, with or without `#COLLECTION`. Raises ConfigError: the index
    or Milvus lacks the ranking; CorpusError: there is no finished index, or it lacks chunks; UsageError: the file is
    open in another process; SchemaError; InfrastructureFault; MissingExtra."""
    where, timeout = parse_address("milvus", uri), config.machine.call_deadline_s
    if where.uri.endswith(".db") and not Path(where.uri).exists():
        raise CorpusError(f"{where.uri} does not exist")
    client = connect(where, timeout)
    with reporting(where, milvus_errors()):
        if where.collection not in client.list_aliases(timeout=timeout)["aliases"]:
            raise CorpusError(f"{where}: there is no finished index of this name: build it with --engine")
        collection = str(client.describe_alias(where.collection, timeout=timeout)["collection_name"])
        described = client.describe_collection(collection, timeout=timeout)
        index = EngineIndex.read((described.get("properties") or {}).get(PROPERTY), str(where))
        check_terms(index.analyser, str(where), "harness1 index SOURCE --engine")
        client.load_collection(collection, timeout=timeout)
        # With Strong consistency, later answers include everything that was inserted.
        count = client.query(collection, output_fields=["count(*)"], consistency_level="Strong", timeout=timeout)
    index.check_count(str(where), count[0]["count(*)"])
    if config.env.retrieval.rerank.on:
        raise ConfigError("env.retrieval.rerank is not available over milvus: set env.retrieval.rerank.on=false")
    mode = ranking_mode(config.env.retrieval, bool(index.embedder))
    queries = None if mode == "bm25" else open_queries(index.settings.dense, config.machine, index.embedder, str(where))
    opened = MilvusEngine(client, collection, index, mode, queries)
    return EngineRetriever(opened, config.machine, secrets_of(where.uri))


class MilvusEngine:
    """A `SearchEngine` over one collection of Milvus."""

    name = "milvus"

    def __init__(
        self, client: MilvusClient, collection: str, index: EngineIndex, mode: Mode, embedder: Embedder | None
    ) -> None:
        self.info, self.errors = index.info, milvus_errors()
        self._client, self._collection, self._mode = client, collection, mode
        self._search, self._embedder = index.settings.dense.search, embedder
        self._analyser = Analyser(index.settings.language)

    def search(self, query: str, k: int, exclude: Sequence[str], timeout: float) -> Hits:
        """Search in one call; the server fuses the lists of a hybrid search, whose depths matter only there."""
        from pymilvus import AnnSearchRequest, RRFRanker

        end = time.monotonic() + timeout
        limit = min(k, MOST)
        condition = f"chunk_id not in [{', '.join(map(quote, exclude))}]" if exclude else ""
        lists = []
        if self._mode != "dense":
            terms = join_terms(self._analyser.query_terms(query)) or NO_TERM
            depth = max(limit, BM25_DEPTH)
            lists.append(AnnSearchRequest([terms], SPARSE, {"metric_type": "BM25"}, depth, expr=condition))
        if self._embedder:
            vectors, depth = list(self._embedder.embed_queries([query])), max(limit, DENSE_DEPTH)
            # Excluded chunks are usually near the query and use up candidates of HNSW.
            effort = {"ef": min(max(HNSW_SEARCH, depth) + len(exclude), MOST)} if self._search == "hnsw" else {}
            param = {"metric_type": "IP", "params": effort}
            lists.append(AnnSearchRequest(vectors, DENSE, param, depth, expr=condition))
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        options: dict[str, Any] = {"limit": limit, "output_fields": STORED, "timeout": left}
        if len(lists) == 1:
            (only,) = lists
            options |= {"anns_field": only.anns_field, "search_params": only.param, "filter": only.expr or ""}
            found = self._client.search(self._collection, data=only.data, **options)
        else:
            found = self._client.hybrid_search(self._collection, lists, RRFRanker(RRF_K), **options)
        (hits,) = found
        # Milvus returns distances or similarities of either sign, of which only the way from the best counts.
        best = float(hits[0]["distance"]) if hits else 0.0
        ways = [abs(float(hit["distance"]) - best) / (abs(best) or 1.0) for hit in hits]
        return [(chunk_of(hit["entity"]), 1.0 - way) for hit, way in zip(hits, ways, strict=True)]

    def stretch(self, start: int, stop: int, literal: str, timeout: float) -> list[Chunk]:
        """Return a stretch of the corpus, sorted here because Milvus returns rows in any order."""
        condition = f"position >= {start} and position < {stop}"
        if literal:
            like = quote(f"%{literal}%")
            condition += f" and (text like {like} or title like {like})"
        rows = self._query(condition, timeout)
        return [chunk_of(row) for row in sorted(rows, key=lambda row: int(row["position"]))]

    def document(self, doc_id: str, timeout: float) -> list[Chunk]:
        return list(map(chunk_of, self._query(f"doc_id == {quote(doc_id)}", timeout)))

    def chunks(self, chunk_ids: Sequence[str], timeout: float) -> list[Chunk]:
        return list(map(chunk_of, self._query(f"chunk_id in [{', '.join(map(quote, chunk_ids))}]", timeout)))

    def _query(self, condition: str, timeout: float) -> list[dict[str, Any]]:
        return list(self._client.query(self._collection, condition, [*STORED, "position"], timeout=timeout))


def build_milvus(documents: Iterable[Document], uri: str, settings: Index, machine: Machine) -> IndexInfo:
    """Build an index of a corpus at `PATH.db` or `http://HOST:PORT`, with or without `#COLLECTION`, replacing an
    earlier one, which answers until the last step. The next build removes what an interrupted one left. Raises
    CorpusError: no documents, ids that are not unique, or a chunk too long for Milvus; UsageError: a foreign collection
    has the name, or the file cannot be opened; InfrastructureFault: Milvus failed; MissingExtra."""
    where = parse_address("milvus", uri)
    embedder = open_embedder(settings.dense, machine) if settings.dense.model else None
    client = connect(where, machine.call_deadline_s)
    try:
        with reporting(where, milvus_errors()):
            aliases, names = client.list_aliases()["aliases"], client.list_collections()
            earlier = None
            if where.collection in aliases:
                earlier = str(client.describe_alias(where.collection)["collection_name"])
            if where.collection in names:
                raise UsageError(f"{where}: this collection was not made by harness1 index: choose another name")
            for name in names:  # of unfinished builds
                if re.fullmatch(f"{re.escape(where.collection)}__[0-9a-f]{{12}}", name) and name != earlier:
                    client.drop_collection(name)
            fresh, stream = f"{where.collection}__{uuid4().hex[:12]}", ChunkStream(documents, settings)
            client.create_collection(fresh, schema=_schema(embedder))
            analyser = Analyser(settings.language)
            for batch in stream.batches(BATCH):
                client.insert(fresh, _rows(batch, analyser, embedder), timeout=machine.call_deadline_s)
            index = stream.finish("milvus", embedder.hash if embedder else "", analyser.language)
            client.flush(fresh)
            params = client.prepare_index_params()
            weights = {"bm25_k1": K1, "bm25_b": B}
            params.add_index(SPARSE, index_type="SPARSE_INVERTED_INDEX", metric_type="BM25", params=weights)
            if embedder:
                kind, graph = ("HNSW", {"M": HNSW_LINKS, "efConstruction": HNSW_BUILD})
                if settings.dense.search == "exact":
                    kind, graph = ("FLAT", {})
                params.add_index(DENSE, index_type=kind, metric_type="IP", params=graph)
            client.create_index(fresh, params)
            client.load_collection(fresh)
            client.alter_collection_properties(fresh, {PROPERTY: msgspec.json.encode(index).decode()})
            if earlier is None:
                client.create_alias(fresh, where.collection)
            else:
                client.alter_alias(fresh, where.collection)
                client.drop_collection(earlier)
    finally:
        client.close()
    return index.info


def _schema(embedder: Embedder | None) -> CollectionSchema:
    from pymilvus import DataType, Function, FunctionType, MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    for name in TEXTS:
        schema.add_field(name, DataType.VARCHAR, max_length=LONGEST, is_primary=name == "chunk_id")
    schema.add_field("number", DataType.INT64)
    schema.add_field("position", DataType.INT64)
    words: Any = {"enable_analyzer": True, "analyzer_params": {"tokenizer": "standard"}}
    schema.add_field(ANALYSED, DataType.VARCHAR, max_length=LONGEST, **words)
    schema.add_field(SPARSE, DataType.SPARSE_FLOAT_VECTOR)
    schema.add_function(Function(SPARSE, FunctionType.BM25, [ANALYSED], [SPARSE]))
    if embedder:
        schema.add_field(DENSE, DataType.FLOAT_VECTOR, dim=embedder.dimensions)
    return schema


def _rows(batch: Sequence[Placed], analyser: Analyser, embedder: Embedder | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for position, piece in batch:
        texts = {name: str(getattr(piece, name)) for name in TEXTS}
        texts[ANALYSED] = join_terms(analyser.terms(join_text(piece)))
        for field, value in texts.items():
            if len(value.encode()) > LONGEST:
                said = f"chunk {piece.chunk_id[:80]!r}: its {field} exceeds the limit of Milvus, {LONGEST} bytes"
                raise CorpusError(f"{said}; lower index.chunk_tokens")
        rows.append({**texts, "number": piece.index, "position": position})
    if embedder:
        vectors = embedder.embed_documents([f"{piece.title}\n{piece.text}" for _, piece in batch])
        for row, vector in zip(rows, vectors, strict=True):
            row[DENSE] = vector
    return rows
