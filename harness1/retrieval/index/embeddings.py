"""The embeddings of a generation in the making: its model, its rows, and the approximate index over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness1 import config
from harness1.errors import UsageError
from harness1.retrieval.checked import DamagedFile, Files, Sums, damaged_blocks, sums_of
from harness1.retrieval.dense.approximate import build_approximate, extend_approximate
from harness1.retrieval.dense.embedder import Embedder, open_embedder
from harness1.retrieval.dense.search import Integers, used_rows
from harness1.retrieval.dense.vectors import Progress, VectorStore, open_vectors, widths
from harness1.retrieval.index.checksums import VECTORS, store_of
from harness1.retrieval.index.index import APPROXIMATE, VectorsEntry, live_rows
from harness1.retrieval.index.segment import Segment


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
        """Continue the embeddings of an earlier generation, which has these segments.

        Raises:
            DamagedFile, OSError: its approximate index is damaged or missing.
        """
        self._before = before
        if self._settings.search != "exact":
            generation.file(APPROXIMATE).check_all()
            self._approximate = generation.folder / APPROXIMATE, used_rows(live_rows(segments))

    def check(self) -> None:
        """Load the model, before any work is done for it.

        Raises:
            UsageError: the model does not exist, or is not the one that the index was embedded with.
            MissingExtra: sentence-transformers is not installed.
        """
        here = self._embedder.hash
        if self._before and here != self._before.embedder:
            raise UsageError(
                "the index was embedded with another model than the one configured now: name the same one with "
                "--set machine.embedder=PATH, or build the index again"
            )

    def rows(self, segment: Segment) -> NDArray[np.int32]:
        """Return the row of each chunk of a segment, and embed those that have none.

        Raises:
            UsageError: as `check`.
            ModelError: the model gives vectors that are not finite.
            CorpusError: the store of embeddings cannot be written, or those of the generation before are damaged.
        """
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
        """Return the checksums of the embeddings that a generation uses, by paths in the index, and those of other
        models' embeddings that a later build may use again.

        Raises:
            DamagedFile: those of the generation before have changed, which must not be taken for what was written.
        """
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
