"""A segment: a stretch of a corpus with everything needed to search it, written once and never changed.

    contents.*          title, line break and text of every chunk; title_bytes.npy says where the text begins
    chunk_ids.*         ids of the chunks, doc_ids.* of the documents
    first_chunks.npy    [documents + 1] where the chunks of each document begin
    doc_sums.npy        [documents, 32] hash of every document, from which the hash of an index is made
    terms.*, postings.* `harness1.retrieval.bm25.postings`
    trigrams.*          `harness1.retrieval.grep.trigrams`
    rows.npy            [chunks] the row of each chunk's embedding, if the index has embeddings

Deleting marks chunks as dead; the marks belong to a generation of the index, not to the segment.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from harness1.hashing import canonical
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.analyser import Analyser
from harness1.retrieval.bm25.postings import Postings, PostingsWriter
from harness1.retrieval.checked import DamagedFile, Files
from harness1.retrieval.corpus import Document, searched_text
from harness1.retrieval.grep.trigrams import Trigrams, write_trigrams
from harness1.retrieval.strings import Keys, Strings, StringWriter, write_keys
from harness1.words import is_foreign

ROWS = "rows.npy"


class SegmentSize(Record):
    """The size of a segment, dead chunks included."""

    documents: int
    chunks: int
    length: int
    """The total length of all chunks, in terms."""
    foreign: int = 0
    """The number of chunks that are mostly in another script than Latin."""


def document_sum(document: Document) -> bytes:
    """Return the 32 bytes that a document adds to the hash of its index."""
    return hashlib.sha256(canonical(document)).digest()


class SegmentWriter:
    """Writes documents, each cut into chunks, as a segment; leaving the context without an error completes it."""

    def __init__(self, folder: Path, analyser: Analyser) -> None:
        folder.mkdir()
        self.folder = folder
        self._contents = StringWriter(folder, "contents")
        self._postings = PostingsWriter(folder, analyser)
        self._title_bytes, self._first_chunks = array("i"), array("i", [0])
        self._sums = bytearray()
        self._foreign = 0
        self.chunk_ids: list[ChunkId] = []
        self.doc_ids: list[DocId] = []
        self.size = SegmentSize(0, 0, 0)
        """Known once the segment is complete."""

    def add(self, doc_id: DocId, sum_: bytes, chunks: Sequence[Chunk]) -> None:
        """Append a document with its `document_sum` and its chunks, in order."""
        for chunk in chunks:
            title = chunk.title.encode()
            self._contents.add(title + b"\n" + chunk.text.encode())
            self._title_bytes.append(len(title))
            self.chunk_ids.append(chunk.chunk_id)
            text = searched_text(chunk)
            self._postings.add(text)
            self._foreign += is_foreign(text)
        self.doc_ids.append(doc_id)
        self._first_chunks.append(len(self.chunk_ids))
        self._sums += sum_

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._contents.__exit__(kind)
        if kind is None:
            self._finish()

    def _finish(self) -> None:
        folder = self.folder
        length = self._postings.finish()
        write_keys(folder, "chunk_ids", self.chunk_ids)
        write_keys(folder, "doc_ids", self.doc_ids)
        np.save(folder / "title_bytes.npy", np.array(self._title_bytes, np.int32))
        np.save(folder / "first_chunks.npy", np.array(self._first_chunks, np.int32))
        np.save(folder / "doc_sums.npy", np.frombuffer(bytes(self._sums), np.uint8).reshape(-1, 32))
        contents = Strings(Files(folder), "contents")
        write_trigrams(folder, contents.file.bytes, contents.ends)
        self.size = SegmentSize(len(self.doc_ids), len(self.chunk_ids), length, self._foreign)


class Segment:
    """One memory-mapped segment, as a generation of an index sees it.

    Args:
        dead: sorted chunks that were deleted.
        dead_counts: for each term, by number, in how many deleted chunks it occurs.
    """

    def __init__(self, files: Files, dead: NDArray[np.uint32], dead_counts: NDArray[np.int32] | None) -> None:
        self._files = files
        self.dead = dead
        self.chunk_ids = Keys(files, "chunk_ids")
        self.doc_ids = Keys(files, "doc_ids")
        self.contents = Strings(files, "contents")
        self.postings = Postings(files, dead, dead_counts)
        self.trigrams = Trigrams(files)
        self._arrays = {name: files.array(f"{name}.npy") for name in ("title_bytes", "first_chunks", "doc_sums")}

    def __len__(self) -> int:
        return len(self.contents)

    @cached_property
    def first_chunks(self) -> NDArray[np.int32]:
        """Where the chunks of each document begin and the last ones end."""
        return self._arrays["first_chunks"].whole()

    @cached_property
    def doc_sums(self) -> NDArray[np.uint8]:
        """The hash of every document."""
        return self._arrays["doc_sums"].whole()

    @cached_property
    def _title_bytes(self) -> NDArray[np.int32]:
        return self._arrays["title_bytes"].whole()

    def rows(self) -> NDArray[np.int32]:
        """Return the row of each chunk's embedding in the store of the index, -1 where the chunk was deleted.

        Raises:
            DamagedFile: they are not as they were written.
            OSError: the index has no embeddings.
        """
        rows: NDArray[np.int32] = np.array(self._files.load(ROWS))
        if rows.shape != (len(self),):
            raise DamagedFile(f"{ROWS} is damaged: it has {len(rows)} rows for {len(self)} chunks")
        rows[self.dead] = -1
        return rows

    def is_dead(self, chunk: int) -> bool:
        at = int(np.searchsorted(self.dead, chunk))
        return at < len(self.dead) and int(self.dead[at]) == chunk

    def chunks_of(self, document: int) -> range:
        """Return the chunks of a document, by its number."""
        return range(int(self.first_chunks[document]), int(self.first_chunks[document + 1]))

    def find_documents(self, doc_ids: Sequence[DocId]) -> list[int]:
        """Return the number of each document, -1 where the segment lacks it or it was deleted."""
        return [
            -1 if number < 0 or self.is_dead(int(self.first_chunks[number])) else number
            for number in self.doc_ids.find(doc_ids)
        ]

    def find_chunks(self, chunk_ids: Sequence[ChunkId]) -> list[int]:
        """Return the number of each chunk, -1 where the segment lacks it or it was deleted."""
        found = self.chunk_ids.find(chunk_ids)
        return [-1 if number < 0 or self.is_dead(number) else number for number in found] if len(self.dead) else found

    def chunk(self, number: int) -> Chunk:
        """Return a chunk, decoded."""
        document = int(np.searchsorted(self.first_chunks, number, side="right")) - 1
        content = self.contents.view(number)
        border = int(self._title_bytes[number])
        return Chunk(
            chunk_id=ChunkId(self.chunk_ids[number]),
            doc_id=DocId(self.doc_ids[document]),
            index=number - int(self.first_chunks[document]),
            title=str(content[:border], "utf-8"),
            text=str(content[border + 1 :], "utf-8"),
        )
