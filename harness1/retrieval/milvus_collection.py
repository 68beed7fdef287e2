"""Where an index lies in Milvus, and its fields.

An index is a collection of its own under a name that is never used twice; an alias with the name that users know points
at it. So a build replaces an index in one step at its end, and a reader never sees chunks of another index.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.http_client import without_password
from harness1.records import Chunk, ChunkId, DocId

if TYPE_CHECKING:
    from pymilvus import MilvusClient

DEFAULT_COLLECTION = "harness1"
PROPERTY = "harness1.index"
"""The property of a finished collection: `EngineIndex` as JSON."""
ANALYSED, SPARSE, DENSE = "terms", "bm25", "embedding"
STORED = ["chunk_id", "doc_id", "number", "title", "text"]
"""The fields that make up a chunk."""
MOST = 16_384
"""Milvus returns no more hits for a query, whatever is asked for."""


class Address(NamedTuple):
    """A file of Milvus Lite or the address of a cluster, and the name of an index in it."""

    uri: str
    collection: str

    @property
    def local(self) -> bool:
        return self.uri.endswith(".db")

    def __str__(self) -> str:
        """Without a password."""
        return f"milvus:{without_password(self.uri)}#{self.collection}"

    def fresh(self) -> str:
        """A name for the collection of the next build."""
        return f"{self.collection}__{uuid4().hex[:12]}"

    def is_build(self, name: str) -> bool:
        """Whether a build for this address made the collection."""
        return re.fullmatch(f"{re.escape(self.collection)}__[0-9a-f]{{12}}", name) is not None


def parse_address(spec: str) -> Address:
    """Read `PATH.db` or `http://HOST:PORT`, with or without `#COLLECTION`.

    Raises:
        UsageError: it is neither.
    """
    uri, _, collection = spec.partition("#")
    if not (uri.endswith(".db") or re.match(r"https?://.", uri)):
        raise UsageError(f"milvus:{without_password(spec)}: give a file PATH.db, or an address http://HOST:19530")
    if collection and not re.fullmatch(r"[A-Za-z_]\w{0,199}", collection, re.ASCII):
        raise UsageError(f"{collection!r} is no name for a collection: use letters, digits and _")
    return Address(uri, collection or DEFAULT_COLLECTION)


def milvus_errors() -> tuple[type[Exception], ...]:
    """What calls of pymilvus raise when they fail.

    Raises:
        MissingExtra: pymilvus is not installed.
    """
    try:
        import grpc
        from pymilvus import MilvusException
    except ImportError as error:
        raise MissingExtra("pymilvus", "milvus") from error
    return (MilvusException, grpc.RpcError)


@contextmanager
def reporting(where: Address) -> Iterator[None]:
    """Turn failures of Milvus into InfrastructureFault, for steps that a user waits for."""
    try:
        yield
    except milvus_errors() as error:
        raise InfrastructureFault(f"{where}: {error}") from error


def connect(where: Address, timeout: float) -> MilvusClient:
    """A client, which may be shared between threads.

    Raises:
        MissingExtra: pymilvus, or for a file milvus-lite, is not installed.
        UsageError: the file cannot be opened: another process may have it open.
        InfrastructureFault: nobody answers within `timeout` seconds.
    """
    errors = milvus_errors()
    from pymilvus import MilvusClient

    if where.local:
        try:
            import milvus_lite  # noqa: F401  (pymilvus starts it)
        except ImportError as error:
            raise MissingExtra("milvus-lite", "milvus") from error
        Path(where.uri).parent.mkdir(parents=True, exist_ok=True)
    # Failures leave as errors and faults; the traceback that pymilvus logs for each would be shown besides.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    try:
        return MilvusClient(uri=where.uri, timeout=timeout)
    except errors as error:
        if where.local:
            raise UsageError(f"{where.uri} cannot be opened; one process at a time may have it open") from error
        raise InfrastructureFault(f"{where}: {error}") from error


def quoted(text: str) -> str:
    """A string literal of Milvus' filter expressions."""
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


def listed(texts: Sequence[str]) -> str:
    """A list of string literals."""
    return f"[{', '.join(map(quoted, texts))}]"


def chunk_of(row: dict[str, Any]) -> Chunk:
    """A chunk from its stored fields."""
    return Chunk(ChunkId(row["chunk_id"]), DocId(row["doc_id"]), int(row["number"]), row["title"], row["text"])
