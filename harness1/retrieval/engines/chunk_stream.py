"""The chunks of a corpus as an engine takes them in: in order, in batches, with what its index is named by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from harness1 import config
from harness1.errors import CorpusError, SchemaError
from harness1.hashing import canonical, digest
from harness1.records import Chunk, Record
from harness1.retrieval.corpus import Document, chunk
from harness1.retrieval.index.index import index_hash
from harness1.retrieval.protocol import IndexInfo

FORMAT = 1


class EngineIndex(Record):
    """What an engine keeps beside the chunks, once all of them are in: without it, an index is not finished."""

    format: int
    info: IndexInfo
    settings: config.Index
    embedder: str = ""
    """Hash of the embedder; empty without embeddings."""

    def check_format(self, name: str) -> None:
        """Raise SchemaError if a newer version of the package laid the index out, CorpusError if an older one did."""
        if self.format > FORMAT:
            raise SchemaError(f"{name} has format {self.format}; this harness1 reads up to {FORMAT}: upgrade it")
        if self.format < FORMAT:
            raise CorpusError(f"{name} has the earlier format {self.format}: build it again with harness1 index")


class Placed(NamedTuple):
    """A chunk and its position in corpus order."""

    position: int
    chunk: Chunk


class ChunkStream:
    """Cuts documents into chunks as they are asked for; when all have passed, `finish` says what they were."""

    def __init__(self, documents: Iterable[Document], settings: config.Index) -> None:
        self._documents, self._settings = documents, settings
        self._ids: set[str] = set()
        self._read, self._chunks, self._content_sum = 0, 0, 0

    def batches(self, size: int) -> Iterator[list[Placed]]:
        """Chunks in corpus order, `size` at a time.

        Raises:
            CorpusError: two documents share an id, or the id of a chunk is also that of another document.
        """
        placed = self._placed()
        while batch := list(islice(placed, size)):
            yield batch

    def finish(self, engine: str, embedder: str) -> EngineIndex:
        """What the index is, after the last batch. The hash is the same for equal documents in any order.

        Raises:
            CorpusError: there were no documents.
        """
        if not self._read:
            raise CorpusError("the corpus holds no documents")
        name = digest([engine, index_hash(self._content_sum, self._settings, embedder)])
        info = IndexInfo(name, self._settings.unit, self._read, self._chunks)
        return EngineIndex(FORMAT, info, self._settings, embedder)

    def _placed(self) -> Iterator[Placed]:
        for document in self._documents:
            pieces = chunk(document, self._settings.chunk_tokens)
            for name in dict.fromkeys((document.doc_id, *(piece.chunk_id for piece in pieces))):
                if name in self._ids:
                    raise CorpusError(f"two documents, or a document and a chunk of another one, have the id {name!r}")
                self._ids.add(name)
            self._content_sum += int.from_bytes(hashlib.sha256(canonical(document)).digest(), "big")
            self._read += 1
            for piece in pieces:
                yield Placed(self._chunks, piece)
                self._chunks += 1
