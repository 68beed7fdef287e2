"""Builds the next generation of an index: build, add, delete.

Documents added together form one segment, or several of at most `LARGEST` chunks, so that memory stays bounded; other
segments are linked into the new generation. Deleting marks chunks as dead. Adjacent small segments are merged, as by
Lucene's log-merge policy, and a segment that is more than half dead is written anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness1 import config
from harness1.errors import CorpusError, UsageError
from harness1.records import ChunkId, DocId
from harness1.retrieval import generations, index
from harness1.retrieval.bm25 import NONE
from harness1.retrieval.corpus import Analyser, Document, chunk, join_text, reads_by_script
from harness1.retrieval.dense import Integers, build_approximate, extend_approximate, find_used_rows
from harness1.retrieval.embedder import Embedder, Progress, VectorStore, open_embedder, open_vectors, row_widths
from harness1.retrieval.files import CheckedFile, DamagedFile, Files, Sums
from harness1.retrieval.protocol import IndexInfo
from harness1.runs.files import write_json
from harness1.words import AUTO, is_foreign

VECTORS = f"{generations.VECTORS}/"
MERGE = 8
"""The least number of adjacent segments that are merged, if none is larger than the others together."""
MOST = 16
"""The most segments that may stay below full size; every search visits each of them."""
LARGEST = 1 << 18
"""The most chunks in a segment, which is then full."""


def build_index(
    documents: Iterable[Document],
    out: Path,
    settings: config.Index,
    progress: Progress | None = None,
    machine: config.Machine = config.Machine(),
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
    with _next_generation(out, alone) as work:
        draft = _Draft(out, work, settings, progress, machine)
        draft.append(documents)
        return draft.finish()


def add_documents(
    documents: Iterable[Document],
    path: Path,
    progress: Progress | None = None,
    machine: config.Machine = config.Machine(),
    *,
    alone: bool = False,
) -> IndexInfo:
    """Add documents to an index as its next generation; an equal id replaces the earlier document. Arguments and errors
    as those of `build_index`, and CorpusError: the folder is not an index, or damaged."""
    with _next_generation(path, alone) as work:
        draft = _Draft.of_current(path, work, progress, machine)
        draft.append(documents)
        return draft.finish()


def delete_documents(
    doc_ids: Iterable[DocId], path: Path, machine: config.Machine = config.Machine(), *, alone: bool = False
) -> IndexInfo:
    """Take documents out of an index; readers of the current generation keep them. Errors as those of `add_documents`,
    and CorpusError: it lacks one of them, or none would be left; nothing is changed."""
    with _next_generation(path, alone) as work:
        draft = _Draft.of_current(path, work, None, machine)
        wanted = list(dict.fromkeys(doc_ids))
        missing = draft.delete(wanted)
        if missing:
            raise CorpusError(f"{path} has no document {missing[0]!r} ({len(missing)} of {len(wanted)} are not there)")
        return draft.finish()


@contextmanager
def _next_generation(out: Path, alone: bool) -> Iterator[Path]:
    with nullcontext() if alone else generations.building(out), generations.new_generation(out) as work:
        yield work


def to_merge(entries: Sequence[index.SegmentEntry]) -> range | None:
    """Return the next adjacent segments to write as one: one that is mostly dead, or enough small ones."""
    for at, entry in enumerate(entries):
        if 2 * entry.dead.chunks > entry.size.chunks:
            return range(at, at + 1)
    sizes = [entry.live.chunks for entry in entries]
    for limit in sorted(set(sizes)):
        for small, group in groupby(range(len(sizes)), key=lambda at: sizes[at] <= limit):
            run = list(group)
            while small and sum(sizes[at] for at in run) > LARGEST:  # beyond a full segment, the last part counts
                run.pop(0)
            total, largest = sum(sizes[at] for at in run), max((sizes[at] for at in run), default=0)
            if small and len(run) >= MERGE and 2 * largest <= total:
                return range(run[0], run[-1] + 1)
    if sum(2 * size <= LARGEST for size in sizes) <= MOST:
        return None
    total, at = min((sizes[at] + sizes[at + 1], at) for at in range(len(sizes) - 1))
    return range(at, at + 2) if total <= LARGEST else None


@dataclass
class _Part:
    """A segment of the draft, with its deletions, and the checksums of its files if it was there before."""

    entry: index.SegmentEntry
    folder: Path
    sums: Mapping[str, Sums] = field(default_factory=dict)
    dead: NDArray[np.uint32] = field(default_factory=lambda: NONE)
    dead_counts: NDArray[np.int32] | None = None

    def open(self) -> index.Segment:
        return index.Segment(Files(self.folder, self.sums), self.dead, self.dead_counts)


class _Draft:
    """A generation in the making."""

    def __init__(
        self, out: Path, work: Path, settings: config.Index, progress: Progress | None, machine: config.Machine
    ) -> None:
        self._out, self._work, self._settings, self._language = out, work, settings, settings.language
        self._analysed = "" if self._language == AUTO else self._language
        self._parts: list[_Part] = []
        self._content_sum = 0
        self._embeddings = _Embeddings(out, settings.dense, machine, progress) if settings.dense.model else None

    @classmethod
    def of_current(cls, path: Path, work: Path, progress: Progress | None, machine: config.Machine) -> _Draft:
        """Return a draft that starts from the current generation."""
        current = generations.current_generation(path)
        files = Files(current, generations.read_checksums(current))
        manifest = index.read_manifest(files, path)
        draft = cls(path, work, manifest.settings, progress, machine)
        draft._language, draft._analysed = manifest.language, manifest.info.language
        draft._content_sum = int(manifest.content_sum, 16)
        for entry in manifest.segments:
            _link(current / entry.name, work / entry.name)
            part = _Part(entry, work / entry.name, files.below(entry.name).sums, *index.dead_marks(files, entry))
            draft._parts.append(part)
        if draft._embeddings and manifest.vectors:
            draft._embeddings.go_on(manifest.vectors, files, [part.open() for part in draft._parts])
        return draft

    def append(self, documents: Iterable[Document]) -> None:
        """Write documents as new segments, and delete those that they replace."""
        if self._embeddings:
            self._embeddings.check()
        doc_ids: list[DocId] = []
        chunk_ids: list[ChunkId] = []
        parts: list[_Part] = []
        rest = iter(documents)
        first = next(rest, None)
        if first and not self._parts and self._language == AUTO:
            self._analysed = AUTO if is_foreign(first.text) else ""  # likely right, so that nothing is written twice
        while first is not None:
            with self._new_segment() as writer:
                first = self._fill(writer, chain([first], rest))
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
        return index.SegmentWriter(self._work / f"segment-{max(numbers, default=0) + 1:06d}", Analyser(self._analysed))

    def _fill(self, writer: index.SegmentWriter, documents: Iterable[Document]) -> Document | None:
        """Write documents until the segment is full, and return the first that did not fit."""
        for document in documents:
            if len(writer.chunk_ids) >= LARGEST:
                return document
            sum_ = index.document_sum(document)
            writer.add(document.doc_id, sum_, chunk(document, self._settings.chunk_tokens))
            self._content_sum += int.from_bytes(sum_, "big")
        return None

    def delete(self, doc_ids: Sequence[DocId]) -> list[DocId]:
        """Mark the chunks of documents as dead, and return the documents that no segment has."""
        missing = set(doc_ids)
        for part in self._parts:
            segment = part.open()
            found = {number for number in segment.find_documents(doc_ids) if number >= 0}
            if found:
                self._bury(part, segment, sorted(found))
                missing -= {DocId(segment.doc_ids[number]) for number in found}
        return [doc_id for doc_id in doc_ids if doc_id in missing]

    def _bury(self, part: _Part, segment: index.Segment, documents: list[int]) -> None:
        chunks = [number for document in documents for number in segment.chunks_of(document)]
        analyser = Analyser(self._analysed)
        texts = [join_text(segment.chunk(number)) for number in chunks]
        counts = segment.postings.count_terms(list(map(analyser.terms, texts)))
        part.dead = np.union1d(part.dead, np.array(chunks, np.uint32)).astype(np.uint32)
        part.dead_counts = counts if part.dead_counts is None else part.dead_counts + counts
        length, foreign = int(segment.postings.lengths[chunks].sum()), sum(map(is_foreign, texts))
        part.entry = part.entry.bury(index.SegmentSize(len(documents), len(chunks), length, foreign))
        sums = segment.doc_sums.array[documents]
        self._content_sum -= sum(int.from_bytes(each.tobytes(), "big") for each in sums)

    def finish(self) -> IndexInfo:
        """Merge the segments that should be one, and write what belongs to the generation as a whole."""
        live = [part.entry.live for part in self._parts]
        by_script = reads_by_script(sum(size.foreign for size in live), sum(size.chunks for size in live))
        if self._language == AUTO and (meant := AUTO if by_script else "") != self._analysed:
            self._analysed = meant
            self._parts = [new for part in self._parts for new in self._rewrite([part])]
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
        name = index.index_hash(self._content_sum, self._settings, embedder, self._analysed)
        info = IndexInfo(name, self._settings.unit, documents, chunks, self._analysed)
        manifest = index.Manifest(index.FORMAT, info, self._settings, content_sum, entries, vectors, self._language)
        write_json(self._work / generations.MANIFEST, manifest)
        known = {f"{part.entry.name}/{name}": sums for part in self._parts for name, sums in part.sums.items()}
        if self._embeddings and vectors:
            known |= self._embeddings.sums(vectors)
        generations.write_checksums(self._work, known)
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


def _link(source: Path, target: Path) -> None:
    """Link the files into another folder, or copy them if the file system cannot link."""
    target.mkdir()
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copy2(file, target / file.name)


class _Embeddings:
    """The embeddings of a generation in the making. The model is loaded when the first text needs it."""

    def __init__(self, out: Path, settings: config.Dense, machine: config.Machine, progress: Progress | None) -> None:
        self._settings, self._machine, self._progress = settings, machine, progress
        self._before: index.VectorsEntry | None = None
        self._approximate: tuple[Path, Integers] | None = None
        sums: dict[str, Sums] = {}
        try:
            if (out / generations.CURRENT).exists():
                sums = generations.read_checksums(generations.current_generation(out))
        except (OSError, CorpusError):  # nothing tells whether the embeddings are as they were written
            shutil.rmtree(out / generations.VECTORS, ignore_errors=True)
        self._out = Files(out, {name: each for name, each in sums.items() if name.startswith(VECTORS)})

    def go_on(self, before: index.VectorsEntry, generation: Files, segments: Sequence[index.Segment]) -> None:
        self._before = before
        if self._settings.search != "exact":
            _ = generation.file(index.APPROXIMATE).bytes
            self._approximate = generation.folder / index.APPROXIMATE, find_used_rows(index.live_rows(segments))

    def check(self) -> None:
        """Load the model before any work is done for it; raise UsageError if the index was embedded with another
        one."""
        here = self._embedder.hash
        if self._before and here != self._before.embedder:
            advice = "name the same one with --set machine.embedder=PATH, or build the index again"
            raise UsageError(f"the index was embedded with another model than the one configured now: {advice}")

    def finish(self, generation: Path, parts: Sequence[_Part]) -> index.VectorsEntry:
        """Give every chunk the row of its embedding, and write the approximate index over them."""
        for part in parts:
            if not (part.folder / index.ROWS).exists():
                self.check()
                contents = part.open().contents
                texts = (contents[number] for number in range(len(contents)))
                np.save(part.folder / index.ROWS, self._store.ensure(texts, self._embedder, self._progress))
        before = self._before or index.VectorsEntry(self._embedder.hash, self._embedder.dimensions, 0)
        folder = self._out.below(generations.store_of(before.embedder)).folder
        entry = index.VectorsEntry(before.embedder, before.dimensions, len(VectorStore(folder, before.dimensions)))
        if self._settings.search != "exact":
            vectors = open_vectors(Files(folder), entry.dimensions, entry.rows)
            used, path = (
                find_used_rows(index.live_rows([part.open() for part in parts])),
                generation / index.APPROXIMATE,
            )
            if not (self._approximate and extend_approximate(*self._approximate, vectors, used, path)):
                build_approximate(vectors, used, self._settings, path)
        return entry

    def sums(self, entry: index.VectorsEntry) -> dict[str, Sums]:
        """Return the checksums of the embeddings that a generation uses, and those of other models' that a later build
        may use. Raises DamagedFile: earlier rows have changed, which must not be taken for what was written."""
        files, found = self._out.below(generations.store_of(entry.embedder)), dict(self._out.sums)
        for name, width in row_widths(entry.dimensions).items():
            size, before = entry.rows * width, files.sums.get(name)
            if before is None or before.size != size:
                _ = files.file(name, grows=True).bytes
                held = CheckedFile(files.folder / name).bytes[:size]
                found[f"{generations.store_of(entry.embedder)}/{name}"] = Sums.of(held)
        return found

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self._settings, self._machine)

    @cached_property
    def _store(self) -> VectorStore:
        """The store; embeddings that were damaged since are an error for an addition, and made anew for a new index."""
        place = generations.store_of(self._embedder.hash)
        files = self._out.below(place)
        try:
            for name in files.sums:
                _ = files.file(name, grows=True).bytes
        except (DamagedFile, FileNotFoundError) as error:
            if self._before:
                raise DamagedFile(f"{files.folder} is damaged; build the index again with --force") from error
            shutil.rmtree(files.folder, ignore_errors=True)
            others = {name: sums for name, sums in self._out.sums.items() if not name.startswith(f"{place}/")}
            self._out = Files(self._out.folder, others)
        return VectorStore(files.folder, self._embedder.dimensions)
