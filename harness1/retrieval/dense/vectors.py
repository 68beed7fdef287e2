"""A growing store of embeddings, each text embedded once: `keys.bin` and `vectors.f16`, row for row.

Keys are the 16-byte blake2b digests of the embedded texts. Vectors reach the disk before their keys do, and a row
counts as soon as it is whole in both files. If a writer is killed, the earlier rows stay valid, and the next writer
cuts off the incomplete rest and continues.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness1.errors import CorpusError
from harness1.retrieval.checked import BLOCK, Files, Sums, damaged_blocks
from harness1.retrieval.dense.embedder import Embedder
from harness1.runs.files import lock, replacing

KEYS, VECTORS = "keys.bin", "vectors.f16"
KEY_BYTES = 16
BATCH = 256
"""New texts that are embedded, written and reported together: seconds of work for a model without a GPU."""

Progress = Callable[[int, int], None]
"""Called with the number of texts done, and the number of those that had to be embedded."""


def widths(dimensions: int) -> dict[str, int]:
    """Return the bytes that a row takes in each file of a store."""
    return {KEYS: KEY_BYTES, VECTORS: 2 * dimensions}


class VectorStore:
    """The embeddings of one embedder in a folder, which is made if needed. Rows never move or change.

    Args:
        dimensions: numbers in a row, of 2 bytes each.
    """

    def __init__(self, folder: Path, dimensions: int) -> None:
        self._folder, self._widths = folder, widths(dimensions)

    def __len__(self) -> int:
        """Return the number of rows that are whole on the disk."""
        sizes = {path: path.stat().st_size if path.exists() else 0 for path in self._paths()}
        return min(size // self._widths[path.name] for path, size in sizes.items())

    def damaged_rows(self, sums: Mapping[str, Sums]) -> NDArray[np.bool_]:
        """Return for each row whether it was damaged or lost since its files had these checksums."""
        rows = max([len(self), *(sums[name].size // width for name, width in self._widths.items() if name in sums)])
        damaged = np.zeros(rows, np.bool_)
        for path in self._paths():
            if path.name in sums and path.exists():
                width = self._widths[path.name]
                for block in damaged_blocks(path, sums[path.name], grows=True):
                    damaged[block * BLOCK // width : -(-(block + 1) * BLOCK // width)] = True
        damaged[len(self) :] = True
        return damaged

    def drop(self, damaged: NDArray[np.bool_]) -> None:
        """Write the store anew without some rows; the others are numbered anew. Killed in between, it is empty.

        Raises:
            CorpusError: the disk is full or the folder cannot be written.
        """
        kept = np.flatnonzero(~damaged[: len(self)])
        with self._writing():
            keys, vectors = self._paths()
            old = [np.fromfile(keys, np.uint8), np.memmap(vectors, np.uint8, "r")]
            keys.unlink()
            for path, data in zip((vectors, keys), reversed(old), strict=True):
                width = self._widths[path.name]
                table = data[: len(data) // width * width].reshape(-1, width)
                with replacing(path) as file:
                    for start in range(0, len(kept), BATCH):
                        file.write(table[kept[start : start + BATCH]].tobytes())

    def _paths(self) -> tuple[Path, Path]:
        return self._folder / KEYS, self._folder / VECTORS

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
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / KEYS).open("a+b") as keys, (self._folder / VECTORS).open("ab") as vectors:
                lock(keys, f"another process is writing embeddings to {self._folder}")
                rows = len(self)
                keys.truncate(rows * self._widths[KEYS])
                vectors.truncate(rows * self._widths[VECTORS])
                yield _Writer(keys, vectors)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
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


class Vectors(NamedTuple):
    """The embeddings of an index, [rows, dimensions], and a function that verifies them, to be called before they are
    used; it costs nothing when it is called again."""

    values: NDArray[np.float16]
    check: Callable[[], None]


def open_vectors(files: Files, dimensions: int, rows: int) -> Vectors:
    """Map the first rows of a store, read-only, as they are while more are appended.

    Raises:
        CorpusError: the store has fewer rows.
    """
    if len(store := VectorStore(files.folder, dimensions)) < rows:
        raise CorpusError(f"{files.folder} holds {len(store)} embeddings of {rows}; build the index again")
    if not rows:
        return Vectors(np.empty((0, dimensions), dtype=np.float16), lambda: None)
    file = files.file(VECTORS, grows=True)
    values = np.frombuffer(file.bytes, np.float16, rows * dimensions).reshape(rows, dimensions)
    return Vectors(values, file.check_all)
