"""Where an index lies in a Chroma server, and how a chunk is stored in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.http_client import without_password
from harness1.records import Chunk, ChunkId, DocId

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
