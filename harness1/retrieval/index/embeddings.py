"""The embeddings of a generation in the making: its model, its rows, and the approximate index over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness1 import config
from harness1.errors import UsageError
from harness1.retrieval.dense.approximate import build_approximate, extend_approximate
from harness1.retrieval.dense.embedder import Embedder, open_embedder
from harness1.retrieval.dense.search import Integers, used_rows
from harness1.retrieval.dense.vectors import Progress, VectorStore, open_vectors
from harness1.retrieval.index.index import APPROXIMATE, VectorsEntry, live_rows
from harness1.retrieval.index.segment import Segment


class Embeddings:
    """Embeds texts that have no embedding yet; the model is loaded when the first text needs it.

    Args:
        out: the index folder; embeddings are kept in its `vectors/`.
    """

    def __init__(self, out: Path, settings: config.Dense, machine: config.Machine, progress: Progress | None) -> None:
        self._out, self._settings, self._run, self._progress = out, settings, machine, progress
        self._before: VectorsEntry | None = None
        self._approximate: tuple[Path, Integers] | None = None

    def go_on(self, before: VectorsEntry, generation: Path, segments: Sequence[Segment]) -> None:
        """Continue the embeddings of an earlier generation, which has these segments."""
        self._before = before
        if self._settings.search != "exact":
            self._approximate = generation / APPROXIMATE, used_rows(live_rows(segments))

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
            CorpusError: the store of embeddings cannot be written.
        """
        self.check()
        texts = (str(segment.contents.view(number), "utf-8") for number in range(len(segment)))
        store = VectorStore(self._folder(self._embedder.hash), self._embedder.dimensions)
        return store.ensure(texts, self._embedder, self._progress)

    def finish(self, generation: Path, segments: Sequence[Segment]) -> VectorsEntry:
        """Write what the generation needs beside its segments, all of which have rows."""
        made_by = self._before or VectorsEntry(self._embedder.hash, self._embedder.dimensions, 0)
        folder = self._folder(made_by.embedder)
        entry = VectorsEntry(made_by.embedder, made_by.dimensions, len(VectorStore(folder, made_by.dimensions)))
        if self._settings.search != "exact":
            vectors = open_vectors(folder, entry.dimensions, entry.rows)
            used = used_rows(live_rows(segments))
            if not (
                self._approximate and extend_approximate(*self._approximate, vectors, used, generation / APPROXIMATE)
            ):
                build_approximate(vectors, used, self._settings, generation / APPROXIMATE)
        return entry

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self._settings, self._run)

    def _folder(self, embedder: str) -> Path:
        return self._out / "vectors" / embedder[:16]
