"""The chunks of a corpus in batches for an engine, and the description of the index that they make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from harness1 import config
from harness1.errors import MALFORMED, CorpusError, SchemaError
from harness1.hashing import canonical, digest
from harness1.records import Chunk, Record
from harness1.retrieval.corpus import Document, chunk
from harness1.retrieval.dense.embedder import CachedQueries, open_embedder
from harness1.retrieval.index.index import index_hash
from harness1.retrieval.protocol import IndexInfo

FORMAT = 1


class EngineIndex(Record):
    """The description of an index, which an engine stores when all chunks are in. An index without it is unfinished."""

    format: int
    info: IndexInfo
    settings: config.Index
    embedder: str = ""
    """Hash of the embedder; empty without embeddings."""

    @classmethod
    def read(cls, text: object, name: str) -> EngineIndex:
        """Read the description that an engine stored as JSON.

        Raises:
            CorpusError: it is not such a description, or one of an older format.
            SchemaError: it has a newer format.
        """
        try:
            index = msgspec.json.decode(str(text), type=cls)
        except MALFORMED as error:
            raise CorpusError(f"{name} is not an index of harness1: choose another name") from error
        index.check_format(name)
        return index

    def check_format(self, name: str) -> None:
        """Raise SchemaError for a newer format, and CorpusError for an older one."""
        if self.format > FORMAT:
            raise SchemaError(f"{name} has format {self.format}; this harness1 reads up to {FORMAT}: upgrade it")
        if self.format < FORMAT:
            raise CorpusError(f"{name} has the earlier format {self.format}: build it again with harness1 index")

    def check_count(self, name: str, held: int) -> None:
        """Raise CorpusError if an engine does not hold all chunks."""
        if held != self.info.chunks:
            raise CorpusError(f"{name} holds {held} chunks instead of {self.info.chunks}: build it again")

    def open_queries(self, name: str, machine: config.Machine) -> CachedQueries:
        """Open the embedder of the index; raise CorpusError if the configured model is another one."""
        embedder = open_embedder(self.settings.dense, machine)
        if embedder.hash != self.embedder:
            raise CorpusError(f"{name} was built with another embedding model: set machine.embedder, or build it again")
        return CachedQueries(embedder, machine.cached_searches)


class Placed(NamedTuple):
    """A chunk and its position in corpus order."""

    position: int
    chunk: Chunk


class ChunkStream:
    """Splits documents into chunks on demand; after the last one, `finish` describes the index."""

    def __init__(self, documents: Iterable[Document], settings: config.Index) -> None:
        self._documents, self._settings = documents, settings
        self._ids: set[str] = set()
        self._read, self._chunks, self._content_sum = 0, 0, 0

    def batches(self, size: int) -> Iterator[list[Placed]]:
        """Yield the chunks in corpus order, `size` at a time; raise CorpusError if two documents share an id, or a
        chunk has the id of another document."""
        placed = self._placed()
        while batch := list(islice(placed, size)):
            yield batch

    def finish(self, engine: str, embedder: str, language: str = "") -> EngineIndex:
        """Return the description of the index, after the last batch. The order of documents does not affect its hash.
        Raise CorpusError if there were no documents.

        Args:
            language: of the analyser, as in `IndexInfo`.
        """
        if not self._read:
            raise CorpusError("the corpus holds no documents")
        name = digest([engine, index_hash(self._content_sum, self._settings, embedder, language)])
        info = IndexInfo(name, self._settings.unit, self._read, self._chunks, language)
        return EngineIndex(FORMAT, info, self._settings, embedder)

    def _placed(self) -> Iterator[Placed]:
        for document in self._documents:
            pieces = chunk(document, self._settings.chunk_tokens)
            for name in dict.fromkeys((document.doc_id, *(piece.chunk_id for piece in pieces))):
                if name in self._ids:
                    raise CorpusError(f"two documents, or a document and a chunk of another, have the id {name!r}")
                self._ids.add(name)
            self._content_sum += int.from_bytes(hashlib.sha256(canonical(document)).digest(), "big")
            self._read += 1
            for piece in pieces:
                yield Placed(self._chunks, piece)
                self._chunks += 1
