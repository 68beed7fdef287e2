"""A growing store of embeddings, each text embedded once: `keys.bin` and `vectors.f16`, row for row.

Keys are the 16-byte blake2b digests of the embedded texts. Vectors reach the disk before their keys do, and a row
counts as soon as it is whole in both files. If a writer is killed, the earlier rows stay valid, and the next writer
cuts off the incomplete rest and continues.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from harness1.errors import CorpusError
from harness1.retrieval.dense.embedder import Embedder
from harness1.runs.files import lock

KEYS, VECTORS = "keys.bin", "vectors.f16"
KEY_BYTES = 16
BATCH = 256
"""New texts that are embedded, written and reported together: seconds of work for a model without a GPU."""

Progress = Callable[[int, int], None]
"""Called with the number of texts done, and the number of those that had to be embedded."""


class VectorStore:
    """The embeddings of one embedder in a folder, which is made if needed. Rows never move or change.

    Args:
        dimensions: numbers in a row, of 2 bytes each.
    """

    def __init__(self, folder: Path, dimensions: int) -> None:
        self._folder, self._dimensions = folder, dimensions

    def __len__(self) -> int:
        """Return the number of rows that are whole on the disk."""
        sizes = [path.stat().st_size if path.exists() else 0 for path in (self._folder / KEYS, self._folder / VECTORS)]
        return min(sizes[0] // KEY_BYTES, sizes[1] // (2 * self._dimensions))

    def ensure(
        self, texts: Iterable[str], embedder: Embedder, progress: Progress | None = None, batch: int = BATCH
    ) -> NDArray[np.int32]:
        """Return the row of each text, in order. Texts without a row are embedded, `batch` at a time; equal texts share
        a row. The texts are read once and not kept.

        Raises:
            CorpusError: the disk is full or the folder cannot be written. What was written before is kept.
            UsageError: another process is writing to the store.
        """
        rows = array("i")
        with self._writer() as writer:
            waiting: list[str] = []
            before = len(writer.rows)
            for text in texts:
                row, new = writer.row(text)
                rows.append(row)
                if new:
                    waiting.append(text)
                if len(waiting) == batch:
                    writer.append(embedder.embed_documents(waiting))
                    waiting.clear()
                    if progress:
                        progress(len(rows), len(writer.rows) - before)
            if waiting:
                writer.append(embedder.embed_documents(waiting))
            if progress:
                progress(len(rows), len(writer.rows) - before)
        return np.array(rows, dtype=np.int32)

    @contextmanager
    def _writer(self) -> Iterator[_Writer]:
        """Yield a writer for both files, cut to whole rows and locked against other writers until the context ends."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / KEYS).open("a+b") as keys, (self._folder / VECTORS).open("ab") as vectors:
                lock(keys, f"another process is writing embeddings to {self._folder}")
                rows = len(self)
                keys.truncate(rows * KEY_BYTES)
                vectors.truncate(rows * 2 * self._dimensions)
                yield _Writer(keys, vectors)
        except OSError as error:
            raise CorpusError(f"cannot write embeddings to {self._folder}: {error}") from error


class _Writer:
    """Gives out rows, and appends their vectors in the same order."""

    def __init__(self, keys: BinaryIO, vectors: BinaryIO) -> None:
        keys.seek(0)
        known = keys.read()
        self.rows = {known[at : at + KEY_BYTES]: at // KEY_BYTES for at in range(0, len(known), KEY_BYTES)}
        self._keys, self._vectors = keys, vectors
        self._unwritten = bytearray()

    def row(self, text: str) -> tuple[int, bool]:
        """Return the row of a text, and whether the row is new and still needs its vector."""
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
        row = self.rows.setdefault(key, new := len(self.rows))
        if row == new:
            self._unwritten += key
        return row, row == new

    def append(self, vectors: NDArray[np.float32]) -> None:
        """Write the vectors of all new rows."""
        for file, data in ((self._vectors, vectors.astype(np.float16).tobytes()), (self._keys, self._unwritten)):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._unwritten.clear()


def open_vectors(folder: Path, dimensions: int, rows: int) -> NDArray[np.float16]:
    """Map the first rows of a store, read-only, as they are while more are appended.

    Raises:
        CorpusError: the store has fewer rows.
    """
    if len(store := VectorStore(folder, dimensions)) < rows:
        raise CorpusError(f"{folder} holds {len(store)} embeddings of {rows}; build the index again")
    if not rows:
        return np.empty((0, dimensions), dtype=np.float16)
    return np.asarray(np.memmap(folder / VECTORS, dtype=np.float16, mode="r", shape=(rows, dimensions)))
