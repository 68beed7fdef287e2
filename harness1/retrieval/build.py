"""Builds the next generation of an index: build, add, delete.

Documents added together form one segment, or several of at most `LARGEST` chunks, so that memory stays bounded. Adding
leaves the other segments as they are (their files are linked into the new generation); deleting marks chunks as dead.
Adjacent small segments are merged, as Lucene's log-merge policy does, so that their number grows with the logarithm of
the corpus, and a segment that is more than half dead is written anew.
"""

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
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.bm25 import NONE
from harness1.retrieval.corpus import Analyser, Document, chunk, reads_by_script, searched_text
from harness1.retrieval.dense import Integers, build_approximate, extend_approximate, used_rows
from harness1.retrieval.embedder import Embedder, Progress, VectorStore, open_embedder, open_vectors, widths
from harness1.retrieval.files import DamagedFile, Files, Sums, damaged_blocks, sums_of
from harness1.retrieval.generations import (
    CURRENT,
    MANIFEST,
    VECTORS,
    building,
    current_generation,
    new_generation,
    read_checksums,
    store_of,
    write_checksums,
)
from harness1.retrieval.index import (
    APPROXIMATE,
    FORMAT,
    ROWS,
    Manifest,
    Segment,
    SegmentEntry,
    SegmentSize,
    SegmentWriter,
    VectorsEntry,
    dead_marks,
    document_sum,
    index_hash,
    live_rows,
    read_manifest,
)
from harness1.retrieval.protocol import IndexInfo
from harness1.runs.files import write_json
from harness1.words import AUTO, is_foreign

MERGE = 8
"""The least number of adjacent segments that are merged, if none is larger than the others together."""
MOST = 16
"""The most segments that may stay below full size; every search visits each of them."""
LARGEST = 1 << 18
"""The most chunks in a segment, which is then full."""


def to_merge(entries: Sequence[SegmentEntry]) -> range | None:
    """Return the next adjacent segments to write as one: one that is mostly dead, or enough small ones."""
    for at, entry in enumerate(entries):
        if 2 * entry.dead.chunks > entry.size.chunks:
            return range(at, at + 1)
    sizes = [entry.live.chunks for entry in entries]
    for limit in sorted(set(sizes)):
        for run in _runs(sizes, limit):
            total, largest = sum(sizes[run.start : run.stop]), max(sizes[run.start : run.stop])
            if len(run) >= MERGE and 2 * largest <= total <= LARGEST:
                return run
    if sum(2 * size <= LARGEST for size in sizes) <= MOST:
        return None
    pairs = [(sizes[at] + sizes[at + 1], at) for at in range(len(sizes) - 1)]
    total, at = min(pairs)
    return range(at, at + 2) if total <= LARGEST else None


def _runs(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Yield stretches of adjacent sizes up to a limit; of a stretch beyond a full segment, the last part."""
    for small, group in groupby(range(len(sizes)), key=lambda at: sizes[at] <= limit):
        places = list(group)
        while small and sum(sizes[at] for at in places) > LARGEST:
            places.pop(0)
        if small and places:
            yield range(places[0], places[-1] + 1)


class Embeddings:
    """Embeds texts that have no embedding yet; the model is loaded when the first text needs it.

    Args:
        out: the index folder; embeddings are kept in its `vectors/`.
    """

    def __init__(self, out: Files, settings: config.Dense, machine: config.Machine, progress: Progress | None) -> None:
        self._out, self._settings, self._run, self._progress = out, settings, machine, progress
        self._before: VectorsEntry | None = None
        self._approximate: tuple[Path, Integers] | None = None

    def go_on(self, before: VectorsEntry, generation: Files, segments: Sequence[Segment]) -> None:
        self._before = before
        if self._settings.search != "exact":
            generation.file(APPROXIMATE).check_all()
            self._approximate = generation.folder / APPROXIMATE, used_rows(live_rows(segments))

    def check(self) -> None:
        """Load the model, before any work is done for it, and compare it with that of the generation before."""
        here = self._embedder.hash
        if self._before and here != self._before.embedder:
            raise UsageError(
                "the index was embedded with another model than the one configured now: name the same one with "
                "--set machine.embedder=PATH, or build the index again"
            )

    def rows(self, segment: Segment) -> NDArray[np.int32]:
        """Return the row of each chunk of a segment, and embed those that have none."""
        self.check()
        texts = (str(segment.contents.view(number), "utf-8") for number in range(len(segment)))
        return self._store.ensure(texts, self._embedder, self._progress)

    def finish(self, generation: Path, segments: Sequence[Segment]) -> VectorsEntry:
        """Write what the generation needs beside its segments, all of which have rows."""
        made_by = self._before or VectorsEntry(self._embedder.hash, self._embedder.dimensions, 0)
        files = self._files(made_by.embedder)
        rows = len(VectorStore(files.folder, made_by.dimensions))
        entry = VectorsEntry(made_by.embedder, made_by.dimensions, rows)
        if self._settings.search != "exact":
            vectors = open_vectors(Files(files.folder), entry.dimensions, rows).values
            used, path = used_rows(live_rows(segments)), generation / APPROXIMATE
            if not (self._approximate and extend_approximate(*self._approximate, vectors, used, path)):
                build_approximate(vectors, used, self._settings, path)
        return entry

    def sums(self, entry: VectorsEntry) -> dict[str, Sums]:
        """Return the checksums of the embeddings that a generation uses, and those of other models' embeddings."""
        files, place = self._files(entry.embedder), store_of(entry.embedder)
        found = {name: sums for name, sums in self._out.sums.items() if name.startswith(f"{VECTORS}/")}
        for name, width in widths(entry.dimensions).items():
            path, before = files.folder / name, files.sums.get(name)
            grown = not before or before.size != entry.rows * width
            if before and grown and damaged_blocks(path, before, grows=True):
                raise DamagedFile(f"{path} is damaged; build the index again with --force")
            found[f"{place}/{name}"] = before if before and not grown else sums_of(path, entry.rows * width)
        return found

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self._settings, self._run)

    @cached_property
    def _store(self) -> VectorStore:
        """The store, without embeddings that were damaged since: a new index leaves them out, an addition fails."""
        files = self._files(self._embedder.hash)
        store = VectorStore(files.folder, self._embedder.dimensions)
        damaged = store.damaged_rows(files.sums)
        if damaged.any() and self._before:
            count = np.count_nonzero(damaged)
            raise DamagedFile(f"{files.folder} is damaged in {count} rows; build the index again with --force")
        if damaged.any():
            store.drop(damaged)
            place = f"{store_of(self._embedder.hash)}/"
            others = {name: sums for name, sums in self._out.sums.items() if not name.startswith(place)}
            self._out = Files(self._out.folder, others)
        return store

    def _files(self, embedder: str) -> Files:
        return self._out.below(store_of(embedder))


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
        alone: the caller keeps other builds out of the folder (`building`).

    Raises:
        CorpusError: there are no documents, two share an id, or the id of a chunk is also that of another document;
            or the folder cannot be written. The earlier generation stays as it was.
        UsageError: another build is at work in the folder.
    """
    with _generation(out, alone) as work:
        draft = _Draft(out, work, settings, settings.language, progress, machine)
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
    """Add documents to an index as its next generation; a document whose id is already there replaces the earlier one.

    Arguments and errors as those of `build_index`.

    Raises:
        CorpusError: the folder is not an index, or the part of it that is read is damaged.
    """
    with _generation(path, alone) as work:
        draft = _Draft.of_current(path, work, progress, machine)
        draft.append(documents)
        return draft.finish()


def delete_documents(
    doc_ids: Iterable[DocId],
    path: Path,
    progress: Progress | None = None,
    machine: config.Machine = config.Machine(),
    *,
    alone: bool = False,
) -> IndexInfo:
    """Take documents out of an index; readers of the current generation keep them.

    Raises:
        CorpusError: the index does not have one of them, or would have no document left, or is damaged; nothing is
            changed.
        UsageError: another build is at work in the folder.
    """
    with _generation(path, alone) as work:
        draft = _Draft.of_current(path, work, progress, machine)
        wanted = list(dict.fromkeys(doc_ids))
        missing = draft.delete(wanted)
        if missing:
            raise CorpusError(f"{path} has no document {missing[0]!r} ({len(missing)} of {len(wanted)} are not there)")
        return draft.finish()


@contextmanager
def _generation(out: Path, alone: bool) -> Iterator[Path]:
    with nullcontext() if alone else building(out), new_generation(out) as work:
        yield work


@dataclass
class _Part:
    """A segment of the draft, with its deletions, and the checksums of its files if it was there before."""

    entry: SegmentEntry
    folder: Path
    sums: Mapping[str, Sums] = field(default_factory=dict)
    dead: NDArray[np.uint32] = field(default_factory=lambda: NONE)
    dead_counts: NDArray[np.int32] | None = None

    def open(self) -> Segment:
        return Segment(Files(self.folder, self.sums), self.dead, self.dead_counts)


class _Draft:
    """A generation in the making.

    Args:
        language: `index.language`; empty for an index that was made before there was such a setting.
    """

    def __init__(
        self,
        out: Path,
        work: Path,
        settings: config.Index,
        language: str,
        progress: Progress | None,
        machine: config.Machine,
    ) -> None:
        self._out, self._work, self._settings, self._language = out, work, settings, language
        self._analysed = "" if language == AUTO else language
        """The language of the analyser that wrote the segments."""
        self._parts: list[_Part] = []
        self._content_sum = 0
        self._embeddings = (
            Embeddings(Files(out, _known_vectors(out)), settings.dense, machine, progress)
            if settings.dense.model
            else None
        )

    @classmethod
    def of_current(cls, path: Path, work: Path, progress: Progress | None, machine: config.Machine) -> _Draft:
        """Return a draft that starts from the current generation."""
        current = current_generation(path)
        files = Files(current, read_checksums(current))
        manifest = read_manifest(files, path)
        draft = cls(path, work, manifest.settings, manifest.language, progress, machine)
        draft._analysed = manifest.info.language
        draft._content_sum = int(manifest.content_sum, 16)
        for entry in manifest.segments:
            _link(current / entry.name, work / entry.name)
            part = _Part(entry, work / entry.name, files.below(entry.name).sums, *dead_marks(files, entry))
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
            parts.append(_Part(SegmentEntry(writer.folder.name, writer.size), writer.folder))
        if not doc_ids:
            raise CorpusError("the corpus holds no documents")
        for one, other in pairwise(sorted(doc_ids)):
            if one == other:
                raise CorpusError(f"two documents have the id {one!r}")
        for chunk_id, other_chunk in pairwise(sorted(chunk_ids)):
            if chunk_id == other_chunk:
                raise CorpusError(
                    f"{chunk_id!r} is the id of a document, and of a chunk of the longer document "
                    f"{chunk_id.rpartition('#')[0]!r}; rename one of the two, or raise index.chunk_tokens"
                )
        self.delete(doc_ids)
        for part in self._parts:
            for chunk_id, number in zip(chunk_ids, part.open().find_chunks(chunk_ids), strict=True):
                if number >= 0:
                    raise CorpusError(f"{chunk_id!r} is the id of a chunk of another document already; rename it")
        self._parts += parts

    def _fill(self, writer: SegmentWriter, documents: Iterable[Document]) -> Document | None:
        """Write documents until the segment is full, and return the first that did not fit."""
        for document in documents:
            if len(writer.chunk_ids) >= LARGEST:
                return document
            sum_ = document_sum(document)
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

    def finish(self) -> IndexInfo:
        """Merge the segments that should be one, and write what belongs to the generation as a whole.

        Raises:
            CorpusError: no document is left.
        """
        self._settle_language()
        while group := to_merge([part.entry for part in self._parts]):
            self._parts[group.start : group.stop] = self._rewritten(self._parts[group.start : group.stop])
        live = [part.entry.live for part in self._parts]
        if not sum(size.documents for size in live):
            raise CorpusError("the corpus holds no documents")
        vectors = None
        if self._embeddings:
            for part in self._parts:
                if not (part.folder / ROWS).exists():
                    np.save(part.folder / ROWS, self._embeddings.rows(part.open()))
            vectors = self._embeddings.finish(self._work, [part.open() for part in self._parts])
        for part in self._parts:
            if part.dead_counts is not None:
                np.save(self._work / f"{part.entry.name}.dead.npy", part.dead)
                np.save(self._work / f"{part.entry.name}.dead_counts.npy", part.dead_counts)
        np.save(self._work / "ranks.npy", _ranks(self._parts))
        info = IndexInfo(
            index_hash=index_hash(
                self._content_sum, self._settings, vectors.embedder if vectors else "", self._analysed
            ),
            unit=self._settings.unit,
            documents=sum(size.documents for size in live),
            chunks=sum(size.chunks for size in live),
            language=self._analysed,
        )
        entries = tuple(part.entry for part in self._parts)
        content_sum = f"{self._content_sum % 2**256:064x}"
        manifest = Manifest(FORMAT, info, self._settings, content_sum, entries, vectors, self._language)
        write_json(self._work / MANIFEST, manifest)
        known = {f"{part.entry.name}/{name}": sums for part in self._parts for name, sums in part.sums.items()}
        write_checksums(self._work, known | (self._embeddings.sums(vectors) if self._embeddings and vectors else {}))
        return info

    def _new_segment(self) -> SegmentWriter:
        numbers = [int(folder.name.removeprefix("segment-")) for folder in self._work.glob("segment-*")]
        return SegmentWriter(self._work / f"segment-{max(numbers, default=0) + 1:06d}", Analyser(self._analysed))

    def _bury(self, part: _Part, segment: Segment, documents: list[int]) -> None:
        """Mark documents (by number) of a segment as dead."""
        chunks = [number for document in documents for number in segment.chunks_of(document)]
        analyser = Analyser(self._analysed)
        texts = [searched_text(segment.chunk(number)) for number in chunks]
        counts = segment.postings.count_terms(list(map(analyser.terms, texts)))
        part.dead = np.union1d(part.dead, np.array(chunks, np.uint32)).astype(np.uint32)
        part.dead_counts = counts if part.dead_counts is None else part.dead_counts + counts
        length = int(segment.postings.lengths[chunks].sum())
        buried = SegmentSize(len(documents), len(chunks), length, sum(map(is_foreign, texts)))
        part.entry = part.entry.buried(buried)
        self._content_sum -= sum(int.from_bytes(segment.doc_sums[number].tobytes(), "big") for number in documents)

    def _settle_language(self) -> None:
        """Write all segments anew if `auto` means another analyser for what the index holds now."""
        live = [part.entry.live for part in self._parts]
        foreign, chunks = sum(size.foreign for size in live), sum(size.chunks for size in live)
        meant = AUTO if reads_by_script(foreign, chunks) else ""
        if self._language == AUTO and meant != self._analysed:
            self._analysed = meant
            self._parts = [new for part in self._parts for new in self._rewritten([part])]

    def _rewritten(self, parts: Sequence[_Part]) -> list[_Part]:
        """Write the living documents of segments as one, and remove the segments; nothing is left of dead ones."""
        written = []
        if any(part.entry.live.documents for part in parts):
            segments = [part.open() for part in parts]
            with self._new_segment() as writer:
                for segment in segments:
                    for doc_id, sum_, chunks in _live_documents(segment):
                        writer.add(doc_id, sum_, chunks)
            if all((part.folder / ROWS).exists() for part in parts):
                rows = live_rows(segments)
                np.save(writer.folder / ROWS, rows[rows >= 0])
            written.append(_Part(SegmentEntry(writer.folder.name, writer.size), writer.folder))
        for part in parts:
            shutil.rmtree(part.folder)
        return written


def _live_documents(segment: Segment) -> Iterator[tuple[DocId, bytes, list[Chunk]]]:
    """Yield id, hash and chunks of the living documents."""
    for number in range(len(segment.doc_ids)):
        chunks = segment.chunks_of(number)
        if not segment.is_dead(chunks.start):
            yield DocId(segment.doc_ids[number]), segment.doc_sums[number].tobytes(), [*map(segment.chunk, chunks)]


def _ranks(parts: Sequence[_Part]) -> NDArray[np.int32]:
    """Return the place of every chunk's id among all ids in lexicographic order, by position."""
    ids: list[str] = []
    for part in parts:
        keys = part.open().chunk_ids
        ids += [keys[number] for number in range(len(keys))]
    ranks = np.empty(len(ids), np.int32)
    ranks[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids), dtype=np.int32)
    return ranks


def _known_vectors(out: Path) -> dict[str, Sums]:
    """Return the checksums of all embeddings that the current generation knows of. If there is one and its checksums
    cannot be read, the embeddings are removed, because nothing tells whether they are as they were written."""
    if not (out / CURRENT).exists():
        return {}
    try:
        sums = read_checksums(current_generation(out))
    except (OSError, CorpusError):
        shutil.rmtree(out / VECTORS, ignore_errors=True)
        return {}
    return {name: each for name, each in sums.items() if name.startswith(f"{VECTORS}/")}


def _link(source: Path, target: Path) -> None:
    """Link the files into another folder, or copy them if the file system cannot link."""
    target.mkdir()
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copy2(file, target / file.name)
