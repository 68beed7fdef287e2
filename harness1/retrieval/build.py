"""Builds the next generation of an index: build, add, delete.

Documents added together form one segment, or several of at most `LARGEST` chunks, so that memory stays bounded; other
segments are linked into the new generation. Deleting marks chunks as dead. The last segments are merged as the digits
of a binary number carry, so that they stay few and none is written often; one that is more than half dead is written
anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import add
from pathlib import Path

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from harness1.config import Dense, Index, Machine
from harness1.errors import CorpusError, UsageError
from harness1.records import ChunkId, DocId
from harness1.retrieval import files, index
from harness1.retrieval.bm25 import NONE
from harness1.retrieval.corpus import ANALYSER, Analyser, Document, chunk, join_text
from harness1.retrieval.dense import Integers, find_used_rows, write_graph
from harness1.retrieval.models import Embedder, Progress, VectorStore, open_embedder, open_vectors, row_widths
from harness1.retrieval.protocol import IndexInfo
from harness1.runs.files import write_json

LARGEST = 1 << 18
"""The most chunks in a segment, which is then full."""


def build_index(
    documents: Iterable[Document],
    out: Path,
    settings: Index,
    progress: Progress | None = None,
    machine: Machine = Machine(),
    *,
    alone: bool = False,
) -> IndexInfo:
    """Build the next generation of an index folder from a corpus; the folder is made if needed.

    Embeddings from an interrupted or earlier build are used again where the text is the same.

    Args:
        documents: with unique ids, such as `open_source(...).documents()`.
        out: the folder that `open_retriever` opens.
        settings: decide the chunks (sizes in tokens), the scored unit and the embeddings.
        progress: is called with the number of texts done, and how many of them had to be embedded.
        machine: names devices and threads for the embedding model.
        alone: the caller keeps other builds out of the folder.

    Raises:
        CorpusError: there are no documents, two share an id, or the id of a chunk is also that of another document;
            or the folder cannot be written. The earlier generation stays as it was.
        UsageError: another build is at work in the folder.
    """
    with files.new_generation(out, alone) as work:
        draft = _Draft(out, work, settings, progress, machine)
        draft.append(documents)
        return draft.finish()


def add_documents(
    documents: Iterable[Document],
    path: Path,
    progress: Progress | None = None,
    machine: Machine = Machine(),
    *,
    alone: bool = False,
) -> IndexInfo:
    """Add documents; an equal id replaces. Raises as `build_index`, and CorpusError: the folder is no index."""
    with files.new_generation(path, alone) as work:
        draft = _Draft.of_current(path, work, progress, machine)
        draft.append(documents)
        return draft.finish()


def delete_documents(
    doc_ids: Iterable[DocId], path: Path, machine: Machine = Machine(), *, alone: bool = False
) -> IndexInfo:
    """Take documents out. Raises as `add_documents`, and CorpusError: one is missing, or none would be left."""
    with files.new_generation(path, alone) as work:
        draft = _Draft.of_current(path, work, None, machine)
        wanted = list(dict.fromkeys(doc_ids))
        missing = draft.delete(wanted)
        if missing:
            raise CorpusError(f"{path} has no document {missing[0]!r} ({len(missing)} of {len(wanted)} are not there)")
        return draft.finish()


def to_merge(entries: Sequence[index.SegmentEntry]) -> range | None:
    """Return the next segments to merge: a mostly dead one, or the last, from one no larger than those behind it."""
    for at, entry in enumerate(entries):
        if 2 * entry.dead.chunks > entry.size.chunks:
            return range(at, at + 1)
    sizes = [entry.live.chunks for entry in entries]
    for at, size in enumerate(sizes):
        behind = sum(sizes[at + 1 :])
        if size <= behind and size + behind <= LARGEST:
            return range(at, len(sizes))
    return None


@dataclass
class _Part:
    """A segment of the draft, with its deletions, and the checksums of its files if it was there before."""

    entry: index.SegmentEntry
    folder: Path
    sums: Mapping[str, files.Sums] = field(default_factory=dict)
    dead: NDArray[np.uint32] = field(default_factory=lambda: NONE)
    dead_counts: NDArray[np.int32] | None = None

    def open(self) -> index.Segment:
        return index.Segment(files.Files(self.folder, self.sums), self.dead, self.dead_counts)


class _Draft:
    """A generation in the making."""

    def __init__(self, out: Path, work: Path, settings: Index, progress: Progress | None, machine: Machine) -> None:
        self._work, self._settings, self._analyser = work, settings, Analyser(settings.language)
        self._parts: list[_Part] = []
        self._content_sum = 0
        self._embeddings = _Embeddings(out, settings.dense, machine, progress) if settings.dense.model else None

    @classmethod
    def of_current(cls, path: Path, work: Path, progress: Progress | None, machine: Machine) -> _Draft:
        """Return a draft that starts from the current generation."""
        current = files.current_generation(path)
        held = files.Files(current, files.read_checksums(current))
        manifest = index.read_manifest(held, path)
        draft = cls(path, work, manifest.settings, progress, machine)
        draft._content_sum = int(manifest.content_sum, 16)
        for entry in manifest.segments:
            shutil.copytree(current / entry.name, work / entry.name, copy_function=_link)
            part = _Part(entry, work / entry.name, held.below(entry.name).sums, *index.dead_marks(held, entry))
            draft._parts.append(part)
        if draft._embeddings and manifest.vectors:
            draft._embeddings.before = manifest.vectors
            if manifest.settings.dense.search != "exact":
                _ = held.file(index.APPROXIMATE).bytes
                rows = index.live_rows([part.open() for part in draft._parts])
                draft._embeddings.graph = current / index.APPROXIMATE, find_used_rows(rows)
        return draft

    def append(self, documents: Iterable[Document]) -> None:
        """Write documents as new segments, and delete those that they replace."""
        if self._embeddings:
            self._embeddings.check()
        doc_ids: list[DocId] = []
        chunk_ids: list[ChunkId] = []
        parts: list[_Part] = []
        rest = iter(documents)
        document = next(rest, None)
        while document:
            with self._new_segment() as writer:
                while document and len(writer.chunk_ids) < LARGEST:
                    sum_ = index.document_sum(document)
                    writer.add(document.doc_id, sum_, chunk(document, self._settings.chunk_tokens))
                    self._content_sum += int.from_bytes(sum_, "big")
                    document = next(rest, None)
            doc_ids += writer.doc_ids
            chunk_ids += writer.chunk_ids
            parts.append(_Part(index.SegmentEntry(writer.folder.name, writer.size), writer.folder))
        if not doc_ids:
            raise CorpusError("the corpus holds no documents")
        if twice := _find_repeated(doc_ids):
            raise CorpusError(f"two documents have the id {twice!r}")
        if twice := _find_repeated(chunk_ids):
            longer = f"a chunk of the longer document {twice.rpartition('#')[0]!r}"
            advice = "rename one of the two, or raise index.chunk_tokens"
            raise CorpusError(f"{twice!r} is the id of a document, and of {longer}; {advice}")
        self.delete(doc_ids)
        for part in self._parts:
            for chunk_id, number in zip(chunk_ids, part.open().find_chunks(chunk_ids), strict=True):
                if number >= 0:
                    raise CorpusError(f"{chunk_id!r} is the id of a chunk of another document already; rename it")
        self._parts += parts

    def _new_segment(self) -> index.SegmentWriter:
        numbers = [int(folder.name.removeprefix("segment-")) for folder in self._work.glob("segment-*")]
        return index.SegmentWriter(self._work / f"segment-{max(numbers, default=0) + 1:06d}", self._analyser)

    def delete(self, doc_ids: Sequence[DocId]) -> list[DocId]:
        """Mark the chunks of documents as dead, and return the documents that no segment has."""
        missing = set(doc_ids)
        for part in self._parts:
            segment = part.open()
            found = sorted({number for number in segment.find_documents(doc_ids) if number >= 0})
            if not found:
                continue
            missing -= {DocId(segment.doc_ids[number]) for number in found}
            chunks = [number for document in found for number in segment.chunks_of(document)]
            texts = (join_text(segment.chunk(number)) for number in chunks)
            counts = segment.postings.count_terms(list(map(self._analyser.terms, texts)))
            part.dead = np.union1d(part.dead, np.array(chunks, np.uint32)).astype(np.uint32)
            part.dead_counts = counts if part.dead_counts is None else part.dead_counts + counts
            more = len(found), len(chunks), int(segment.postings.lengths[chunks].sum())
            dead = index.SegmentSize(*map(add, astuple(part.entry.dead), more))
            part.entry = index.SegmentEntry(part.entry.name, part.entry.size, dead)
            sums = segment.doc_sums.array[found]
            self._content_sum -= sum(int.from_bytes(each.tobytes(), "big") for each in sums)
        return [doc_id for doc_id in doc_ids if doc_id in missing]

    def finish(self) -> IndexInfo:
        """Merge the segments that should be one, and write what belongs to the generation as a whole."""
        while group := to_merge([part.entry for part in self._parts]):
            self._parts[group.start : group.stop] = self._rewrite(self._parts[group.start : group.stop])
        entries = tuple(part.entry for part in self._parts)
        documents, chunks = (sum(getattr(each.live, name) for each in entries) for name in ("documents", "chunks"))
        if not documents:
            raise CorpusError("the corpus holds no documents")
        vectors = self._embeddings.finish(self._work, self._parts) if self._embeddings else None
        ids: list[str] = []
        for part in self._parts:
            keys = part.open().chunk_ids
            ids += [keys[number] for number in range(len(keys))]
            if part.dead_counts is not None:
                np.save(self._work / f"{part.entry.name}.dead.npy", part.dead)
                np.save(self._work / f"{part.entry.name}.dead_counts.npy", part.dead_counts)
        ranks = np.empty(len(ids), np.int32)
        ranks[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids), dtype=np.int32)
        np.save(self._work / "ranks.npy", ranks)
        embedder, content_sum = vectors.embedder if vectors else "", f"{self._content_sum % 2**256:064x}"
        name = index.index_hash(self._content_sum, self._settings, embedder)
        info = IndexInfo(name, self._settings.unit, documents, chunks, self._settings.language)
        manifest = index.Manifest(index.FORMAT, info, self._settings, content_sum, entries, vectors, ANALYSER)
        write_json(self._work / files.MANIFEST, manifest)
        known = {f"{part.entry.name}/{name}": sums for part in self._parts for name, sums in part.sums.items()}
        if self._embeddings:
            known |= self._embeddings.sums
        files.write_checksums(self._work, known)
        return info

    def _rewrite(self, parts: Sequence[_Part]) -> list[_Part]:
        """Write the living documents of segments as one, and remove the segments."""
        written = []
        if any(part.entry.live.documents for part in parts):
            segments = [part.open() for part in parts]
            with self._new_segment() as writer:
                for segment in segments:
                    for number in range(len(segment.doc_ids)):
                        chunks = segment.chunks_of(number)
                        if not segment.is_dead(chunks.start):
                            doc_id, sum_ = DocId(segment.doc_ids[number]), segment.doc_sums.array[number].tobytes()
                            writer.add(doc_id, sum_, [*map(segment.chunk, chunks)])
            if all((part.folder / index.ROWS).exists() for part in parts):
                rows = index.live_rows(segments)
                np.save(writer.folder / index.ROWS, rows[rows >= 0])
            written.append(_Part(index.SegmentEntry(writer.folder.name, writer.size), writer.folder))
        for part in parts:
            shutil.rmtree(part.folder)
        return written


def _find_repeated(ids: Sequence[str]) -> str | None:
    return next((one for one, other in pairwise(sorted(ids)) if one == other), None)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it if the file system cannot link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class _Embeddings:
    """The embeddings of a generation in the making; `before` and `graph`, with its rows, are those that are changed."""

    def __init__(self, out: Path, settings: Dense, machine: Machine, progress: Progress | None) -> None:
        self._out, self._settings, self._machine, self._progress = out, settings, machine, progress
        self.before: index.VectorsEntry | None = None
        self.graph: tuple[Path, Integers] | None = None
        self.sums: dict[str, files.Sums] = {}
        """Of the embeddings of all models, which a later build may use, by paths in the index."""
        try:
            if (out / files.CURRENT).exists():
                known = files.read_checksums(files.current_generation(out))
                self.sums = {name: each for name, each in known.items() if name.startswith(f"{files.VECTORS}/")}
        except (OSError, CorpusError):  # nothing tells whether the embeddings are as they were written
            shutil.rmtree(out / files.VECTORS, ignore_errors=True)

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self._settings, self._machine)

    def check(self) -> None:
        """Load the model before any work is done for it. Raises UsageError: the index was embedded with another one."""
        if self.before and self._embedder.hash != self.before.embedder:
            advice = "name the same one with --set machine.embedder=PATH, or build the index again"
            raise UsageError(f"the index was embedded with another model than the one configured now: {advice}")
        _ = self._embedder

    def finish(self, generation: Path, parts: Sequence[_Part]) -> index.VectorsEntry:
        """Give every chunk the row of its embedding, and write the graph over them."""
        fresh = [part for part in parts if not (part.folder / index.ROWS).exists()]
        entry = self._embed(fresh) if fresh or self.before is None else self.before
        place = files.store_of(entry.embedder)
        for name, width in row_widths(entry.dimensions).items():
            size, before = entry.rows * width, self.sums.get(f"{place}/{name}")
            if before is None or before.size != size:
                # Earlier rows that changed meanwhile must not be taken for what was written.
                _ = files.CheckedFile(self._out / place / name, before, grows=True).bytes
                self.sums[f"{place}/{name}"] = files.Sums.of(files.CheckedFile(self._out / place / name).bytes[:size])
        if self._settings.search != "exact":
            vectors = open_vectors(files.Files(self._out / place), entry.dimensions, entry.rows)
            used = find_used_rows(index.live_rows([part.open() for part in parts]))
            write_graph(generation / index.APPROXIMATE, vectors, used, self.graph)
        return entry

    def _embed(self, parts: Sequence[_Part]) -> index.VectorsEntry:
        """Embed the chunks of new segments. Damaged embeddings fail an addition; a new index makes them anew."""
        self.check()
        embedder = self._embedder
        held = files.Files(self._out, self.sums).below(files.store_of(embedder.hash))
        try:
            for name in held.sums:
                _ = held.file(name, grows=True).bytes
        except (files.DamagedFile, FileNotFoundError) as error:
            if self.before:
                raise files.DamagedFile(f"{held.folder} is damaged; build the index again with --force") from error
            shutil.rmtree(held.folder, ignore_errors=True)
            place = files.store_of(embedder.hash)
            self.sums = {name: each for name, each in self.sums.items() if not name.startswith(f"{place}/")}
        store = VectorStore(held.folder, embedder.dimensions)
        for part in parts:
            contents = part.open().contents
            texts = (contents[number] for number in range(len(contents)))
            np.save(part.folder / index.ROWS, store.ensure(texts, embedder, self._progress))
        return index.VectorsEntry(embedder.hash, embedder.dimensions, len(store))
