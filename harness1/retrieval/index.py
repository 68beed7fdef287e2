"""An index on disk: one pass over a corpus makes it, opening it maps it. Its generations: `retrieval.generations`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from harness1 import config
from harness1.errors import CorpusError, SchemaError
from harness1.hashing import canonical, digest
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.bm25 import ANALYSER, BM25, BM25Builder
from harness1.retrieval.chunking import chunk
from harness1.retrieval.corpus import Document
from harness1.retrieval.generations import current_generation, new_generation
from harness1.retrieval.retriever import IndexInfo
from harness1.retrieval.strings import Keys, Strings, StringWriter, load_array, write_keys

FORMAT = 1
CACHED_CHUNKS = 4096
REPORT_EVERY = 256
"""Documents between two reports of progress."""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`index.json`."""

    format: int
    info: IndexInfo
    settings: config.Index


class _Format(msgspec.Struct):
    format: int


def build_index(
    documents: Iterable[Document], out: Path, settings: config.Index, progress: Callable[[int], None] | None = None
) -> IndexInfo:
    """Cut, analyse and store a corpus as the next generation of an index folder, which is made if need be.

    Args:
        progress: called now and then, and at the end, with the number of documents read so far.

    Raises:
        CorpusError: there are no documents, two share an id, or the id of a chunk is also that of another document;
            or the folder cannot be written. The earlier generation stays as it was.
        UsageError: another build is at work in the folder.
    """
    with new_generation(out) as work:
        return _write_generation(documents, work, settings, progress)


def build_hash(settings: config.Index) -> str:
    """Names how an index is built, whatever the corpus: layout on disk, analyser and settings."""
    return digest([FORMAT, ANALYSER, settings])


def open_index(path: Path) -> EmbeddedIndex:
    """Open the current generation of an index folder; its data is mapped, not read.

    Raises:
        CorpusError: the folder is no index, or is damaged.
        SchemaError: it was built by a newer version of the package.
    """
    generation = current_generation(path)
    try:
        manifest = (generation / "index.json").read_bytes()
        newest = msgspec.json.decode(manifest, type=_Format).format
        if newest > FORMAT:
            raise SchemaError(f"{path} is an index of format {newest}; this harness1 reads up to {FORMAT}: upgrade it")
        if newest < FORMAT:
            raise CorpusError(f"{path} is an index of the earlier format {newest}: build it again with harness1 index")
        return EmbeddedIndex(generation, msgspec.json.decode(manifest, type=_Manifest).info)
    except (OSError, ValueError) as error:
        raise CorpusError(f"the index {path} is damaged ({error}); build it again with: harness1 index") from error


class EmbeddedIndex:
    """One generation: its chunks by position in corpus order, and the BM25 index over them. Made by `open_index`."""

    def __init__(self, folder: Path, info: IndexInfo) -> None:
        self.info = info
        self._chunk_ids = Keys(folder, "chunk_ids")
        self._doc_ids = Keys(folder, "doc_ids")
        self._contents = Strings(folder, "contents")
        self._title_bytes = load_array(folder / "title_bytes.npy")
        self._first_chunks = load_array(folder / "first_chunks.npy")
        self.bm25 = BM25(folder, load_array(folder / "ranks.npy"))
        self.chunk = lru_cache(CACHED_CHUNKS)(self._decode)
        """The chunk at a position; while it is cached, always the same object."""

    def __len__(self) -> int:
        return len(self._contents)

    def positions(self, chunk_ids: Iterable[ChunkId]) -> list[int]:
        """Where chunks are, in the order asked; ids that the corpus does not have are left out."""
        return [position for position in self._chunk_ids.find(chunk_ids) if position >= 0]

    def positions_of(self, doc_id: DocId) -> range:
        """Where the chunks of a document are; empty if the corpus does not have it."""
        (document,) = self._doc_ids.find([doc_id])
        if document < 0:
            return range(0)
        return range(int(self._first_chunks[document]), int(self._first_chunks[document + 1]))

    def contents(self, positions: range) -> Iterator[memoryview]:
        """Title, line break and text of chunks, as UTF-8, not copied."""
        return map(self._contents.view, positions)

    def _decode(self, position: int) -> Chunk:
        document = int(np.searchsorted(self._first_chunks, position, side="right")) - 1
        content = self._contents.view(position)
        border = int(self._title_bytes[position])
        return Chunk(
            chunk_id=ChunkId(self._chunk_ids[position]),
            doc_id=DocId(self._doc_ids[document]),
            index=position - int(self._first_chunks[document]),
            title=str(content[:border], "utf-8"),
            text=str(content[border + 1 :], "utf-8"),
        )


def _write_generation(
    documents: Iterable[Document], folder: Path, settings: config.Index, progress: Callable[[int], None] | None
) -> IndexInfo:
    """Write all files of a generation, in one pass over the documents."""
    bm25 = BM25Builder()
    chunk_ids: list[ChunkId] = []
    doc_ids: list[DocId] = []
    title_bytes, first_chunks, content_sum = array("i"), array("i", [0]), 0
    with StringWriter(folder, "contents") as contents:
        for document in documents:
            for piece in chunk(document, settings.chunk_tokens):
                title = piece.title.encode()
                contents.add(title + b"\n" + piece.text.encode())
                title_bytes.append(len(title))
                chunk_ids.append(piece.chunk_id)
                bm25.add(f"{piece.title} {piece.text}")
            doc_ids.append(document.doc_id)
            first_chunks.append(len(chunk_ids))
            content_sum += int.from_bytes(hashlib.sha256(canonical(document)).digest(), "big")
            if progress and len(doc_ids) % REPORT_EVERY == 0:
                progress(len(doc_ids))
    if progress:
        progress(len(doc_ids))
    ranks = _checked_ranks(doc_ids, chunk_ids)
    bm25.write(folder, settings.k1, settings.b)
    write_keys(folder, "chunk_ids", chunk_ids)
    write_keys(folder, "doc_ids", doc_ids)
    for name, values in (("title_bytes", title_bytes), ("first_chunks", first_chunks), ("ranks", ranks)):
        np.save(folder / f"{name}.npy", np.array(values, dtype=np.int32))
    info = IndexInfo(
        index_hash=_index_hash(content_sum, settings),
        unit=settings.unit,
        documents=len(doc_ids),
        chunks=len(chunk_ids),
    )
    manifest = msgspec.json.encode(_Manifest(format=FORMAT, info=info, settings=settings))
    (folder / "index.json").write_bytes(msgspec.json.format(manifest) + b"\n")
    return info


def _index_hash(content_sum: int, settings: config.Index) -> str:
    """Equal for equal documents in any order: sums do not depend on it."""
    return digest({"documents": f"{content_sum % 2**256:064x}", "analyser": ANALYSER, "settings": settings})


def _checked_ranks(doc_ids: Sequence[DocId], chunk_ids: Sequence[ChunkId]) -> list[int]:
    """The place of every chunk id in lexicographic order, once it is sure that no two are equal."""
    if not doc_ids:
        raise CorpusError("the corpus holds no documents")
    for one, other in pairwise(sorted(doc_ids)):
        if one == other:
            raise CorpusError(f"two documents have the id {one!r}")
    order = sorted(range(len(chunk_ids)), key=chunk_ids.__getitem__)
    ranks = [0] * len(order)
    for rank, position in enumerate(order):
        ranks[position] = rank
        if rank and chunk_ids[order[rank - 1]] == chunk_ids[position]:
            raise CorpusError(
                f"{chunk_ids[position]!r} is the id of a document, and of a chunk of the longer document "
                f"{chunk_ids[position].rpartition('#')[0]!r}; rename one of the two, or raise index.chunk_tokens"
            )
    return ranks
