"""An open index on disk: its segments as one, memory-mapped. `harness1.retrieval.build` makes it.

    index.json                      what the index is, and its segments in corpus order
    ranks.npy                       the place of every chunk's id among all ids in lexicographic order
    dense.faiss                     the graph over embeddings, if the settings ask for one
    segment-*.dead.npy              chunks of a segment that were deleted, and
    segment-*.dead_counts.npy       in how many of them each of its terms occurs
    segment-*/                      a segment: a stretch of the corpus with everything needed to search it, written once
                                    and never changed, and shared with other generations by links

    segment-*/contents.*            title, line break and text of every chunk; title_bytes.npy: where texts begin
    segment-*/chunk_ids.*           ids of the chunks, doc_ids.* of the documents
    segment-*/first_chunks.npy      [documents + 1] where the chunks of each document begin
    segment-*/doc_sums.npy          [documents, 32] hash of every document, of which the hash of an index is made
    segment-*/terms.*, postings.*   `harness1.retrieval.bm25`
    segment-*/trigrams.*            `harness1.retrieval.grep`
    segment-*/rows.npy              [chunks] the row of each chunk's embedding, if the index has embeddings

Positions are numbered through the chunks of all segments, dead ones included.
"""

from __future__ import annotations

import errno
import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from harness1.config import Index
from harness1.config.env import read_index_description
from harness1.errors import MALFORMED, ConfigError, CorpusError, SchemaError
from harness1.plain import WITH_SERVER, canonical, digest
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.bm25 import BM25, NONE, Postings, PostingsWriter
from harness1.retrieval.corpus import ANALYSER, Analyser, Document, join_text
from harness1.retrieval.files import (
    MANIFEST,
    DamagedFile,
    Files,
    Keys,
    Strings,
    current_generation,
    read_checksums,
    store_of,
    write_keys,
)
from harness1.retrieval.grep import Trigrams, write_trigrams
from harness1.retrieval.protocol import IndexInfo

if TYPE_CHECKING:
    from harness1.retrieval.dense import DenseIndex

FORMAT = 2
ROWS, APPROXIMATE = "rows.npy", "dense.faiss"
CACHED_CHUNKS, CACHED_PLACES = 4096, 1 << 17
"""Chunks, and positions of ids (about 100 bytes each), that are remembered."""


class SegmentSize(Record):
    """The size of a segment, dead chunks included."""

    documents: int
    chunks: int
    length: int


class SegmentEntry(Record):
    """A segment in a generation: its whole size, and the dead part."""

    name: str
    size: SegmentSize
    dead: SegmentSize = SegmentSize(0, 0, 0)

    @property
    def live(self) -> SegmentSize:
        """The size of the living part."""
        return SegmentSize(*map(sub, astuple(self.size), astuple(self.dead)))


class VectorsEntry(Record):
    """The embeddings of a generation: their embedder, and the number of rows of the store that it uses."""

    embedder: str
    dimensions: int
    rows: int


class Manifest(Record):
    """`index.json`."""

    format: int
    info: IndexInfo
    settings: Index
    content_sum: str
    """Sum of the hashes of all documents, modulo 2**256, hexadecimal."""
    segments: tuple[SegmentEntry, ...]
    vectors: VectorsEntry | None = None
    analyser: str = ""
    """`ANALYSER` of the version that built it, if it had one."""


class OutdatedIndex(CorpusError):
    """A whole index of an earlier version, with settings that are no longer there, or with other terms."""


class _Format(msgspec.Struct):
    format: int


def document_sum(document: Document) -> bytes:
    """Return the 32 bytes that a document adds to the hash of its index."""
    return hashlib.sha256(canonical(document)).digest()


def build_hash(settings: Index) -> str:
    """Return the hash of how an index is built, whatever the corpus: layout on disk, analyser and settings, but the
    address of a model."""
    named = settings.to_hash()
    if served := WITH_SERVER.fullmatch(settings.dense.model):
        named["dense"]["model"] = served[1]
    return digest([FORMAT, ANALYSER, named])


def index_hash(content_sum: int, settings: Index, embedder: str) -> str:
    """Return a hash of documents in any order, and of how they are read."""
    named = settings.to_hash()
    named["dense"]["model"] = embedder
    return digest({"documents": f"{content_sum % 2**256:064x}", "analyser": ANALYSER, "settings": named})


class SegmentWriter:
    """Writes documents, each cut into chunks, as a segment; leaving the context without an error completes it."""

    def __init__(self, folder: Path, analyser: Analyser) -> None:
        folder.mkdir()
        self.folder = folder
        self._contents = (folder / "contents.bin").open("wb")
        self._postings = PostingsWriter(folder, analyser)
        self._ends, self._title_bytes, self._first_chunks = array("q", [0]), array("i"), array("i", [0])
        self._sums = bytearray()
        self.chunk_ids: list[ChunkId] = []
        self.doc_ids: list[DocId] = []
        self.size = SegmentSize(0, 0, 0)
        """Known once the segment is complete."""

    def add(self, doc_id: DocId, sum_: bytes, chunks: Sequence[Chunk]) -> None:
        """Append a document with its `document_sum` and its chunks, in order."""
        for chunk in chunks:
            title = chunk.title.encode()
            written = self._contents.write(title + b"\n" + chunk.text.encode())
            self._ends.append(self._ends[-1] + written)
            self._title_bytes.append(len(title))
            self.chunk_ids.append(chunk.chunk_id)
            self._postings.add(join_text(chunk))
        self.doc_ids.append(doc_id)
        self._first_chunks.append(len(self.chunk_ids))
        self._sums += sum_

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._contents.close()
        if kind is not None:
            return
        folder = self.folder
        length = self._postings.finish()
        write_keys(folder, "chunk_ids", self.chunk_ids)
        write_keys(folder, "doc_ids", self.doc_ids)
        np.save(folder / "contents.ends.npy", np.array(self._ends, np.int64))
        np.save(folder / "title_bytes.npy", np.array(self._title_bytes, np.int32))
        np.save(folder / "first_chunks.npy", np.array(self._first_chunks, np.int32))
        np.save(folder / "doc_sums.npy", np.frombuffer(bytes(self._sums), np.uint8).reshape(-1, 32))
        contents = Strings(Files(folder), "contents")
        write_trigrams(folder, contents.bytes, contents.ends)
        self.size = SegmentSize(len(self.doc_ids), len(self.chunk_ids), length)


class Segment:
    """One memory-mapped segment, as a generation of an index sees it; `dead` and `dead_counts` as in `Postings`."""

    def __init__(self, files: Files, dead: NDArray[np.uint32], dead_counts: NDArray[np.int32] | None) -> None:
        self._files = files
        self.dead = dead
        self.chunk_ids = Keys(files, "chunk_ids")
        self.doc_ids = Keys(files, "doc_ids")
        self.contents = Strings(files, "contents")
        self.postings = Postings(files, dead, dead_counts)
        self.trigrams = Trigrams(files)
        self.first_chunks: NDArray[np.int32] = files.load("first_chunks.npy")
        self._title_bytes: NDArray[np.int32] = files.load("title_bytes.npy")
        self.doc_sums = files.file("doc_sums.npy")

    def __len__(self) -> int:
        return len(self.contents)

    def rows(self) -> NDArray[np.int32]:
        """Return the row of each chunk's embedding, -1 if deleted. Raises DamagedFile; OSError: there are none."""
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


def open_index(path: Path) -> EmbeddedIndex:
    """Open the current generation of an index folder; its data is mapped, and read when first needed. Raises
    CorpusError: the folder is not an index, or is damaged; SchemaError: a newer version built it."""
    while True:
        generation = current_generation(path)
        try:
            files = Files(generation, read_checksums(generation))
            return EmbeddedIndex(path, files, read_manifest(files, path))
        except (OSError, ValueError) as error:
            if current_generation(path) != generation:
                continue  # two builds finished since, and the second one deleted it
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise CorpusError(f"{path}: too many open files in this process; raise `ulimit -n`") from error
            raise _say_damage(path, error) from error


def read_manifest(files: Files, path: Path) -> Manifest:
    """Read `index.json` of the index at `path`. Raises SchemaError: it is newer; CorpusError: it is damaged, or older;
    OutdatedIndex: it was built with settings that are no longer there, or has other terms."""
    try:
        encoded = (files.folder / MANIFEST).read_bytes()
        found = msgspec.json.decode(encoded, type=_Format).format
        if found > FORMAT:
            raise SchemaError(f"{path} is an index of format {found}; this harness1 reads up to {FORMAT}: upgrade it")
        if found < FORMAT:
            raise CorpusError(f"{path} is an index of the earlier format {found}: build it again with harness1 index")
        manifest = read_index_description(encoded, Manifest)
        if manifest.analyser != ANALYSER:
            command = f"harness1 index SOURCE --out {path} --force"
            raise OutdatedIndex(f"{path} has the terms of an earlier version: build it again with {command}")
        _ = files.file(MANIFEST).bytes  # verified last, because a newer version may write other checksums
        return manifest
    except ConfigError as error:
        raise OutdatedIndex(f"{path} must be built again, with harness1 index --force: {error}") from error
    except MALFORMED as error:
        raise _say_damage(path, error) from error


def _say_damage(path: Path, error: Exception) -> CorpusError:
    return CorpusError(f"the index {path} is damaged ({error}); build it again with: harness1 index --force")


def dead_marks(files: Files, entry: SegmentEntry) -> tuple[NDArray[np.uint32], NDArray[np.int32] | None]:
    """Return the deleted chunks of a segment, and in how many of them each of its terms occurs."""
    if not entry.dead.chunks:
        return NONE, None
    return files.load(f"{entry.name}.dead.npy"), files.load(f"{entry.name}.dead_counts.npy")


def live_rows(segments: Sequence[Segment]) -> NDArray[np.int32]:
    """Return the row of each position's embedding, -1 where the chunk was deleted."""
    return np.concatenate([segment.rows() for segment in segments])


class EmbeddedIndex:
    """One generation, with its chunks by position in corpus order, and its search. Made by `open_index`."""

    def __init__(self, path: Path, files: Files, manifest: Manifest) -> None:
        self.info, self.settings, self.vectors = manifest.info, manifest.settings, manifest.vectors
        self._path, self._files = path, files
        self.segments = [Segment(files.below(each.name), *dead_marks(files, each)) for each in manifest.segments]
        self.firsts = list(accumulate(map(len, self.segments), initial=0))
        self.ranks = files.load("ranks.npy")
        if len(self.ranks) != len(self):
            raise DamagedFile(f"ranks.npy is damaged: it has {len(self.ranks)} ranks for {len(self)} chunks")
        length = sum(entry.live.length for entry in manifest.segments)
        postings = [segment.postings for segment in self.segments]
        self.bm25 = BM25(postings, self.info.chunks, length, self.ranks, Analyser(self.settings.language))
        self._places: dict[ChunkId, int] = {}
        """Later searches often exclude what earlier ones found."""
        self.chunk = lru_cache(CACHED_CHUNKS)(self._decode)
        """Return the chunk at a position; always the same object while it is cached."""

    def __len__(self) -> int:
        """Return the number of positions, those of deleted chunks included."""
        return self.firsts[-1]

    @cached_property
    def dense(self) -> DenseIndex | None:
        """Search by embeddings, if the index has them. Raises CorpusError, OSError: damaged."""
        if self.vectors is None:
            return None
        from harness1.retrieval.dense import DenseIndex, find_used_rows, open_gpu, open_graph
        from harness1.retrieval.models import open_vectors

        store = Files(self._path, self._files.sums).below(store_of(self.vectors.embedder))
        vectors = open_vectors(store, self.vectors.dimensions, self.vectors.rows)
        rows = live_rows(self.segments)
        if self.settings.dense.search == "exact":
            return DenseIndex(vectors, rows, self.ranks, open_gpu(vectors, rows))
        _ = self._files.file(APPROXIMATE).bytes
        graph = open_graph(self._files.folder / APPROXIMATE, len(find_used_rows(rows)))
        return DenseIndex(vectors, rows, self.ranks, graph)

    def positions(self, chunk_ids: Iterable[ChunkId]) -> list[int]:
        """Return the positions of chunks, in the order asked; ids that the corpus lacks are left out."""
        wanted = list(chunk_ids)
        known = {chunk_id: self._places.get(chunk_id) for chunk_id in wanted}
        unknown = [chunk_id for chunk_id, place in known.items() if place is None]
        for segment, first in zip(self.segments, self.firsts, strict=False):
            found = zip(unknown, segment.find_chunks(unknown), strict=True)
            known |= {chunk_id: first + number for chunk_id, number in found if number >= 0}
        return [place for chunk_id in wanted if (place := known[chunk_id]) is not None]

    def positions_of(self, doc_id: DocId) -> range:
        """Return the positions of a document's chunks; none if the corpus lacks it."""
        for segment, first in zip(self.segments, self.firsts, strict=False):
            (document,) = segment.find_documents([doc_id])
            if document >= 0:
                chunks = segment.chunks_of(document)
                return range(first + chunks.start, first + chunks.stop)
        return range(0)

    def _decode(self, position: int) -> Chunk:
        at = bisect_right(self.firsts, position) - 1
        chunk = self.segments[at].chunk(position - self.firsts[at])
        if len(self._places) < CACHED_PLACES:
            self._places[chunk.chunk_id] = position
        return chunk
