"""An open index on disk: its segments as one, memory-mapped, not read. `harness1.retrieval.index.build` makes it.

    index.json                      what the index is, and its segments in corpus order
    segment-*/                      `harness1.retrieval.index.segment`; shared with other generations by links
    segment-*.dead.npy              chunks of a segment that were deleted, and
    segment-*.dead_counts.npy       in how many of them each of its terms occurs
    ranks.npy                       the place of every chunk's id among all ids in lexicographic order
    dense.faiss                     the approximate index over embeddings, if the settings ask for one
    checksums                       of all these files, and of the embeddings (`harness1.retrieval.index.checksums`)

Positions are numbered through the chunks of all segments, dead ones included. Embeddings are beside the generations, in
`vectors/`, because all generations share one store.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import add, sub
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from harness1 import config
from harness1.errors import MALFORMED, CorpusError, SchemaError
from harness1.hashing import digest
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.analyser import ANALYSER, Analyser
from harness1.retrieval.bm25.search import BM25, NONE
from harness1.retrieval.checked import DamagedFile, Files
from harness1.retrieval.index.checksums import MANIFEST, read_checksums, store_of
from harness1.retrieval.index.generations import current_generation
from harness1.retrieval.index.segment import Segment, SegmentSize
from harness1.retrieval.protocol import IndexInfo

if TYPE_CHECKING:
    from harness1.retrieval.dense.search import DenseIndex

FORMAT = 2
APPROXIMATE = "dense.faiss"
CACHED_CHUNKS = 4096
CACHED_IDS = CACHED_PLACES = 1 << 17
"""Ids and positions remembered in both directions, about 200 bytes each."""


class SegmentEntry(Record):
    """A segment in a generation: its whole size, and the dead part."""

    name: str
    size: SegmentSize
    dead: SegmentSize = SegmentSize(0, 0, 0)

    @property
    def live(self) -> SegmentSize:
        """The size of the living part."""
        size, dead = self.size, self.dead
        return SegmentSize(*map(sub, astuple(size), astuple(dead)))

    def buried(self, more: SegmentSize) -> SegmentEntry:
        """Return the entry with this much more of the segment dead."""
        return SegmentEntry(self.name, self.size, SegmentSize(*map(add, astuple(self.dead), astuple(more))))


class VectorsEntry(Record):
    """The embeddings of a generation: their embedder, and the number of rows of the store that it uses."""

    embedder: str
    dimensions: int
    rows: int


class Manifest(Record):
    """`index.json`."""

    format: int
    info: IndexInfo
    settings: config.Index
    content_sum: str
    """Sum of the hashes of all documents, modulo 2**256, hexadecimal."""
    segments: tuple[SegmentEntry, ...]
    vectors: VectorsEntry | None = None
    language: str = ""
    """`index.language`; empty in indexes made before there was such a setting, which stay as they are."""


class _Format(msgspec.Struct):
    format: int


def build_hash(settings: config.Index) -> str:
    """Return the hash of how an index is built, whatever the corpus: layout on disk, analyser and settings."""
    return digest([FORMAT, ANALYSER, settings.hashed()])


def index_hash(content_sum: int, settings: config.Index, embedder: str, language: str = "") -> str:
    """Return a hash that is equal for equal documents in any order, because sums do not depend on it. The embedder
    enters by its own hash, and the language only if the analyser was made for one, so that earlier hashes stay."""
    named = settings.hashed() | ({"language": language} if language else {})
    named["dense"]["model"] = embedder
    return digest({"documents": f"{content_sum % 2**256:064x}", "analyser": ANALYSER, "settings": named})


def read_manifest(files: Files, path: Path) -> Manifest:
    """Read `index.json` of a generation; `path` is the index as the user named it.

    Raises:
        CorpusError: it is damaged, or of an earlier format.
        SchemaError: it was written by a newer version of the package.
    """
    try:
        encoded = (files.folder / MANIFEST).read_bytes()
        newest = msgspec.json.decode(encoded, type=_Format).format
        if newest > FORMAT:
            raise SchemaError(f"{path} is an index of format {newest}; this harness1 reads up to {FORMAT}: upgrade it")
        if newest < FORMAT:
            raise CorpusError(f"{path} is an index of the earlier format {newest}: build it again with harness1 index")
        return msgspec.json.decode(files.file(MANIFEST).bytes, type=Manifest)
    except MALFORMED as error:
        raise _damaged(path, error) from error


def open_index(path: Path) -> EmbeddedIndex:
    """Open the current generation of an index folder; its data is mapped, not read.

    Raises:
        CorpusError: the folder is not an index, or is damaged.
        SchemaError: it was built by a newer version of the package.
    """
    while True:
        generation = current_generation(path)
        try:
            files = Files(generation, read_checksums(generation))
            return EmbeddedIndex(path, files, read_manifest(files, path))
        except (OSError, ValueError) as error:
            if current_generation(path) != generation:
                continue  # two builds finished since, and the second one deleted it
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise CorpusError(
                    f"{path}: too many open files in this process; raise its limit (ulimit -n)"
                ) from error
            raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CorpusError:
    return CorpusError(f"the index {path} is damaged ({error}); build it again with: harness1 index --force")


class EmbeddedIndex:
    """One generation, with its chunks by position in corpus order and the means to search them. Made by
    `open_index`."""

    def __init__(self, path: Path, files: Files, manifest: Manifest) -> None:
        self.info, self.settings, self.vectors = manifest.info, manifest.settings, manifest.vectors
        self._path, self._files = path, files
        self.segments = [open_segment(files, entry) for entry in manifest.segments]
        self._firsts = list(accumulate(map(len, self.segments), initial=0))
        self._ranks = files.load("ranks.npy")
        if len(self._ranks) != len(self):
            raise DamagedFile(f"ranks.npy is damaged: it has {len(self._ranks)} ranks for {len(self)} chunks")
        length = sum(entry.live.length for entry in manifest.segments)
        postings = [segment.postings for segment in self.segments]
        weights, analyser = (manifest.settings.k1, manifest.settings.b), Analyser(self.info.language)
        self.bm25 = BM25(postings, self.info.chunks, length, self._ranks, *weights, analyser)
        self._places: dict[ChunkId, int] = {}
        self._named = lru_cache(CACHED_IDS)(self._name)
        self.chunk = lru_cache(CACHED_CHUNKS)(self._decode)
        """Return the chunk at a position; always the same object while it is cached."""

    def __len__(self) -> int:
        """Return the number of positions, those of deleted chunks included."""
        return self._firsts[-1]

    @cached_property
    def dense(self) -> DenseIndex | None:
        """Search by embeddings, if the index has them.

        Raises:
            CorpusError: the embeddings are damaged, truncated or missing.
        """
        if self.vectors is None:
            return None
        from harness1.retrieval.dense.approximate import open_approximate, open_gpu
        from harness1.retrieval.dense.search import DenseIndex
        from harness1.retrieval.dense.vectors import open_vectors

        store = Files(self._path, self._files.sums).below(store_of(self.vectors.embedder))
        vectors = open_vectors(store, self.vectors.dimensions, self.vectors.rows)
        rows, settings = live_rows(self.segments), self.settings.dense
        if settings.search == "exact":
            return DenseIndex(vectors.values, rows, self._ranks, open_gpu(vectors, rows), vectors.check)
        self._files.file(APPROXIMATE).check_all()
        approximate = open_approximate(self._files.folder / APPROXIMATE, settings)
        return DenseIndex(vectors.values, rows, self._ranks, approximate, vectors.check)

    def positions(self, chunk_ids: Iterable[ChunkId]) -> list[int]:
        """Return the positions of chunks, in the order asked; ids that the corpus lacks are left out."""
        wanted = list(chunk_ids)
        places = [place for place in map(self._places.get, wanted) if place is not None]
        if len(places) == len(wanted):
            return places
        known = {chunk_id: self._places.get(chunk_id) for chunk_id in wanted}
        unknown = [chunk_id for chunk_id, place in known.items() if place is None]
        for segment, first in zip(self.segments, self._firsts, strict=False):
            found = zip(unknown, segment.find_chunks(unknown), strict=True)
            known |= {chunk_id: first + number for chunk_id, number in found if number >= 0}
        return [place for chunk_id in wanted if (place := known[chunk_id]) is not None]

    def positions_of(self, doc_id: DocId) -> range:
        """Return the positions of a document's chunks; none if the corpus lacks it."""
        for segment, first in zip(self.segments, self._firsts, strict=False):
            (document,) = segment.find_documents([doc_id])
            if document >= 0:
                chunks = segment.chunks_of(document)
                return range(first + chunks.start, first + chunks.stop)
        return range(0)

    def position(self, segment: int, number: int) -> int:
        """Return the position of a chunk of a segment, both by number."""
        return self._firsts[segment] + number

    def chunk_ids(self, positions: Iterable[int]) -> list[ChunkId]:
        """Return the ids of chunks, without their texts."""
        return [self._named(position) for position in positions]

    def _locate(self, position: int) -> tuple[Segment, int]:
        at = bisect_right(self._firsts, position) - 1
        return self.segments[at], position - self._firsts[at]

    def _name(self, position: int) -> ChunkId:
        """Return the id at a position, and remember its position, because later searches often exclude it."""
        segment, number = self._locate(position)
        chunk_id = ChunkId(segment.chunk_ids[number])
        if len(self._places) < CACHED_PLACES:
            self._places[chunk_id] = position
        return chunk_id

    def _decode(self, position: int) -> Chunk:
        self._named(position)
        segment, number = self._locate(position)
        return segment.chunk(number)


def live_rows(segments: Sequence[Segment]) -> NDArray[np.int32]:
    """Return the row of each position's embedding, -1 where the chunk was deleted.

    Raises:
        DamagedFile, OSError: they are damaged or missing.
    """
    return np.concatenate([segment.rows() for segment in segments])


def dead_marks(files: Files, entry: SegmentEntry) -> tuple[NDArray[np.uint32], NDArray[np.int32] | None]:
    """Return the deleted chunks of a segment, and in how many of them each of its terms occurs.

    Raises:
        DamagedFile, OSError: they are damaged or missing.
    """
    if not entry.dead.chunks:
        return NONE, None
    return files.load(f"{entry.name}.dead.npy"), files.load(f"{entry.name}.dead_counts.npy")


def open_segment(files: Files, entry: SegmentEntry) -> Segment:
    """Open a segment as a generation sees it.

    Raises:
        DamagedFile, OSError: it is damaged or missing.
    """
    return Segment(files.below(entry.name), *dead_marks(files, entry))
