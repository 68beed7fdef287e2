"""Search by embeddings: the best chunks by cosine, in the total order, independent of the batch.

Candidates are found fast and roughly: by products in single precision, on a GPU too, or by graphs (HNSW) or lists (IVF)
of faiss that skip most rows. Their cosines are then computed in double precision, row by row, so that neither the batch
nor the machine affects the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from harness1 import config
from harness1.errors import CorpusError, optional
from harness1.retrieval.protocol import STEP, best_first

BLOCK = 4096
"""Rows multiplied at a time: more would not fit in the cache, fewer would need more calls."""
FEW = 2
"""Up to this many queries are multiplied one by one, at the speed of memory; more share a matrix product."""
FILLED = 256
"""The least number of candidates gathered before the worse ones are dropped."""
SPARE = 16
"""Rows fetched beyond twice the requested `k`, because the nearest are then reordered in double precision."""
SAMPLED = 40
"""Rows for each list of an IVF on which its centres are trained."""
GROWTH = 2
"""The factor by which an index may grow before it is rebuilt, because its lists were trained on its first rows."""
GPU_MOST = 2048
"""The most rows that faiss returns from a GPU."""
GPU_ROUNDING = 2.0**-9
"""The largest joint error of two products of vectors of length 1 on a GPU that cuts fractions to 10 bits (TF32)."""
NO_SLOTS, NO_SCORES = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)

Integers = NDArray[np.integer[Any]]

HNSW_LINKS, HNSW_BUILD, HNSW_SEARCH = 32, 200, 128
"""Links of each vector in a graph, and candidates compared while it is built and kept while it is searched."""
IVF_PROBES = 32
"""Lists that a search reads: more find more and take longer."""


class RowSearcher(Protocol):
    """Finds the slots where the best rows may be. A slot is the place of a row among those in use (`used_rows`)."""

    @property
    def size(self) -> int:
        """The number of slots."""
        ...

    def find(self, queries: NDArray[np.float32], ks: Sequence[int], dead: Sequence[Integers]) -> list[Integers]:
        """Return for each query the slots of its best `k` rows, of all that may equal them, and possibly of others.

        Args:
            queries: [b, d], of length 1.
            dead: for each query, the slots to leave out, ascending.
        """
        ...


def used_rows(rows: Integers) -> Integers:
    """Return the distinct rows of chunks, ascending; a negative number means that a chunk has no row."""
    used = np.zeros(rows.max(initial=-1) + 1, dtype=bool)
    used[rows[rows >= 0]] = True
    return np.flatnonzero(used).astype(np.int32)


class DenseIndex:
    """The embeddings of the chunks of a corpus.

    Args:
        vectors: [rows, d], half precision, of length 1 or 0.
        rows: for each position, the row of its chunk, which others may share; negative if it is never found.
        ranks: for each position, the place of its id among all ids in lexicographic order; it breaks ties.
        candidates: an approximate index over `used_rows(rows)`, or a faster exact one; None to multiply every row.

    Raises CorpusError: the approximate index was built from other vectors, or a row does not exist.
    """

    def __init__(
        self,
        vectors: NDArray[np.float16],
        rows: Integers,
        ranks: NDArray[np.int32],
        candidates: RowSearcher | None = None,
    ) -> None:
        if rows.max(initial=-1) >= len(vectors):
            raise CorpusError(f"a chunk has the embedding {rows.max()} of {len(vectors)}; build the index again")
        self._vectors, self._ranks = vectors, ranks
        self._used = used_rows(rows)
        self._candidates = candidates or Scan(vectors, self._used)
        if self._candidates.size != len(self._used):
            raise CorpusError(
                f"the approximate index has {self._candidates.size} vectors, and the corpus {len(self._used)}; "
                "build the index again"
            )
        slots = np.zeros(len(vectors) + 1, dtype=np.int32)  # the last is for -1, where there are no vectors
        slots[self._used] = np.arange(len(self._used))
        self._slots = np.where(rows >= 0, slots[np.maximum(rows, -1)], -1).astype(np.int32)
        order = np.argsort(self._slots, kind="stable")
        self._positions = order[np.count_nonzero(rows < 0) :].astype(np.int32)
        self._counts = np.bincount(self._slots[self._positions], minlength=len(self._used)).astype(np.int32)
        self._ends = np.cumsum(self._counts, dtype=np.int32)

    def search(
        self, queries: NDArray[np.float32], ks: Sequence[int], excludes: Sequence[Integers]
    ) -> list[list[tuple[int, float]]]:
        """Return for each query the positions of its best `k` chunks with their cosines, in the total order.

        Excluded chunks (by position, each once) are left out, also from the top score, to which the order is relative.

        Args:
            queries: [b, d], of length 1.
        """
        dead = [self._dead(exclude) for exclude in excludes]
        found = self._candidates.find(queries, ks, dead)
        return [self._best(*each) for each in zip(queries, found, ks, excludes, strict=True)]

    def cosines(self, query: NDArray[np.float32], positions: Integers) -> NDArray[np.float64]:
        """Return the cosine of a query of length 1 with the chunk at each position; 0 for a chunk without a row."""
        slots = self._slots[positions]
        found = np.zeros(len(positions))
        found[slots >= 0] = _cosines(query, self._vectors, self._used[slots[slots >= 0]])
        return found

    def _dead(self, exclude: Integers) -> Integers:
        """Return the slots whose chunks are all excluded."""
        slots, counts = np.unique(self._slots[exclude], return_counts=True)
        dead: Integers = slots[(slots >= 0) & (counts == self._counts[slots])] if len(self._used) else slots[:0]
        return dead

    def _best(self, query: NDArray[np.float32], slots: Integers, k: int, exclude: Integers) -> list[tuple[int, float]]:
        """Order the chunks at candidate slots."""
        counts = self._counts[slots]
        firsts = np.repeat(self._ends[slots] - np.cumsum(counts), counts)
        positions = self._positions[firsts + np.arange(len(firsts))]
        scores = np.repeat(_cosines(query, self._vectors, self._used[slots]), counts)
        kept = ~np.isin(positions, exclude)
        positions, scores = positions[kept], scores[kept]
        order = best_first(scores, self._ranks[positions], k)
        return list(zip(positions[order].tolist(), scores[order].tolist(), strict=True))


class Scan:
    """Exact search: multiplies every row in use, block by block."""

    def __init__(self, vectors: NDArray[np.float16], used: Integers) -> None:
        self._vectors, self._used = vectors.view(np.int16), used
        self.size = len(used)

    def find(self, queries: NDArray[np.float32], ks: Sequence[int], dead: Sequence[Integers]) -> list[Integers]:
        """Return all slots whose product may be among the `k` best or share the level of the last of them."""
        margin = 2 * STEP + rounding(queries.shape[1])
        best = [_Best(k, margin, slots) for k, slots in zip(ks, dead, strict=True)]
        wide = np.empty((min(BLOCK, self.size), queries.shape[1]), dtype=np.float32)
        for start in range(0, self.size, BLOCK):
            halves = self._rows(start)
            for one, scores in zip(best, _products(halves, queries, wide), strict=True):
                one.add(start, scores)
        return [one.slots() for one in best]

    def _rows(self, start: int) -> NDArray[np.int16]:
        """Return the bits of a block of rows, without a copy if all between the first and the last are in use."""
        rows = self._used[start : start + BLOCK]
        first, last = int(rows[0]), int(rows[-1])
        return self._vectors[first : last + 1] if last - first < len(rows) else self._vectors[rows]


class _Best:
    """The slots seen so far that score within a margin of the k-th best, or better."""

    def __init__(self, k: int, margin: float, dead: Integers) -> None:
        self._k, self._margin, self._dead = k, margin, dead
        self._slots: list[Integers] = []
        self._scores: list[NDArray[np.float32]] = []
        self._floor = -np.inf if k > 0 else np.inf
        self._room = 0

    def add(self, start: int, scores: NDArray[np.float32]) -> None:
        """Take the scores of the slots from `start` on; those of dead slots are overwritten."""
        if len(self._dead):
            dead = slice(*np.searchsorted(self._dead, (start, start + len(scores))))
            scores[self._dead[dead] - start] = -np.inf
        found = np.flatnonzero(scores > self._floor)
        self._slots.append(found + start)
        self._scores.append(scores[found])
        self._room -= len(found)
        if self._room < 0:
            self.slots()
            self._room = max(self._k, FILLED)

    def slots(self) -> Integers:
        """Return the slots kept so far, and raise the floor for later ones."""
        slots, scores = np.concatenate([NO_SLOTS, *self._slots]), np.concatenate([NO_SCORES, *self._scores])
        if len(scores) >= self._k > 0:
            self._floor = float(np.partition(scores, -self._k)[-self._k]) - self._margin
            kept = scores > self._floor
            slots, scores = slots[kept], scores[kept]
        self._slots, self._scores = [slots], [scores]
        return slots


def rounding(dimensions: int) -> float:
    """Return the largest joint error of two products of vectors of about length 1, in single precision: 2^-24 for each
    dimension (Higham, "Accuracy and stability of numerical algorithms", 3.1), doubled for "about"."""
    return 4 * dimensions * 2.0**-24


def _products(
    halves: NDArray[np.int16], queries: NDArray[np.float32], wide: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the products [b, n] of queries and rows; `wide` is a buffer for the rows in single precision."""
    from harness1.retrieval.kernels import dots, widen

    if len(queries) <= FEW:
        products = np.empty((len(queries), len(halves)), dtype=np.float32)
        for query, out in zip(queries, products, strict=True):
            dots(halves, query, out)
        return products
    widen(halves, wide[: len(halves)])
    return np.ascontiguousarray((wide[: len(halves)] @ queries.T).T)


def _cosines(query: NDArray[np.float32], vectors: NDArray[np.float16], rows: Integers) -> NDArray[np.float64]:
    """Return products with rows in double precision, each summed by itself: a matrix product may round by shape."""
    cosines = np.empty(len(rows), dtype=np.float64)
    wide = query.astype(np.float64)
    for start in range(0, len(rows), BLOCK):
        block = slice(start, start + BLOCK)
        cosines[block] = (vectors[rows[block]] * wide).sum(axis=1)
    return cosines


def build_approximate(vectors: NDArray[np.float16], used: Integers, settings: config.Dense, path: Path) -> None:
    """Write an index over the used rows, in half precision, for the inner product. One thread and fixed seeds make
    equal input give equal bytes.

    Args:
        used: as `used_rows` gives them.
        settings: `search` is `hnsw` or `ivf`.

    Raises:
        MissingExtra: faiss is not installed.
        CorpusError: the file cannot be written.
    """
    faiss = _faiss()
    dimensions, metric = vectors.shape[1], faiss.METRIC_INNER_PRODUCT
    with _one_thread(faiss):
        if settings.search == "hnsw":
            index = faiss.IndexHNSWSQ(dimensions, faiss.ScalarQuantizer.QT_fp16, HNSW_LINKS, metric)
            index.hnsw.efConstruction = HNSW_BUILD
            index.train(np.zeros((1, dimensions), dtype=np.float32))
        else:
            count = max(1, min(int(4 * len(used) ** 0.5), len(used)))
            index = faiss.IndexIVFScalarQuantizer(
                faiss.IndexFlatIP(dimensions), dimensions, count, faiss.ScalarQuantizer.QT_fp16, metric, False
            )
            index.cp.spherical = True
            index.cp.min_points_per_centroid = 1  # faiss writes warnings to stderr about small corpora
            evenly = used[:: max(1, len(used) // (SAMPLED * count))]
            index.train(vectors[evenly].astype(np.float32))
        _add(index, vectors, used)
    with _as_fault(f"write {path}"):
        faiss.write_index(index, str(path))


def extend_approximate(
    before: Path, before_used: Integers, vectors: NDArray[np.float16], used: Integers, path: Path
) -> bool:
    """Write an earlier index with the rows added since; return False if a row was removed or rows more than doubled.

    Args:
        before_used: the used rows of the index at `before`.

    Raises MissingExtra, CorpusError: as `build_approximate`, or the earlier index is not there.
    """
    size = len(before_used)
    if not np.array_equal(used[:size], before_used) or len(used) > GROWTH * size:
        return False
    faiss = _faiss()
    with _as_fault(f"read {before}"):
        index = faiss.read_index(str(before))
    with _one_thread(faiss):
        _add(index, vectors, used[size:])
    with _as_fault(f"write {path}"):
        faiss.write_index(index, str(path))
    return True


def open_approximate(path: Path, settings: config.Dense) -> Approximate:
    """Map what `build_approximate` wrote.

    Raises:
        MissingExtra: faiss is not installed.
        CorpusError: the file is not there or is damaged.
    """
    faiss = _faiss()
    flag = faiss.IO_FLAG_MMAP_IFC if settings.search == "hnsw" else faiss.IO_FLAG_MMAP
    with _as_fault(f"read {path}"):
        return Approximate(faiss, faiss.read_index(str(path), flag), settings)


class Approximate:
    """`RowSearcher` of an HNSW or IVF index. Queries are searched one at a time, so no result depends on the batch."""

    def __init__(self, faiss: Any, index: Any, settings: config.Dense) -> None:
        self._faiss, self._index, self._settings = faiss, index, settings
        self.size: int = index.ntotal

    def find(self, queries: NDArray[np.float32], ks: Sequence[int], dead: Sequence[Integers]) -> list[Integers]:
        return [self._find(*each) for each in zip(queries, ks, dead, strict=True)]

    def _find(self, query: NDArray[np.float32], k: int, dead: Integers) -> Integers:
        if k < 1:
            return np.empty(0, dtype=np.int64)
        count = min(2 * k + SPARE, self.size)
        faiss, settings = self._faiss, self._settings
        chosen = {"sel": faiss.IDSelectorNot(faiss.IDSelectorBatch(dead.astype(np.int64)))} if len(dead) else {}
        if settings.search == "hnsw":  # the walk passes excluded rows, often the nearest
            walk = max(HNSW_SEARCH, count) + len(dead)
            parameters = faiss.SearchParametersHNSW(efSearch=walk, **chosen)
        else:
            parameters = faiss.SearchParametersIVF(nprobe=IVF_PROBES, **chosen)
        slots: NDArray[np.int64] = self._index.search(query[None], count, params=parameters)[1][0]
        return slots[slots >= 0]


def open_gpu(vectors: NDArray[np.float16], rows: Integers) -> GpuScan | None:
    """Return exact search on the first GPU, or None if faiss is not installed for GPUs or sees none."""
    if find_spec("faiss") is None:
        return None
    faiss = _faiss()
    if not getattr(faiss, "get_num_gpus", int)():
        return None
    used = used_rows(rows)
    index = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), vectors.shape[1])
    _add(index, vectors, used)
    return GpuScan(index, Scan(vectors, used))


class GpuScan:
    """`RowSearcher` of a flat index on a GPU. It is exact: a query with more near ties than a GPU returns is scanned.

    Args:
        index: a faiss index. It cannot exclude rows, so many more are fetched.
    """

    def __init__(self, index: Any, scan: Scan) -> None:
        self._index, self._scan = index, scan
        self.size = scan.size

    def find(self, queries: NDArray[np.float32], ks: Sequence[int], dead: Sequence[Integers]) -> list[Integers]:
        wanted = 2 * max(k + len(slots) for k, slots in zip(ks, dead, strict=True)) + SPARE
        scores, slots = self._index.search(queries, min(wanted, GPU_MOST, self.size))
        return [self._verify(*each) for each in zip(queries, ks, dead, scores, slots, strict=True)]

    def _verify(
        self, query: NDArray[np.float32], k: int, dead: Integers, scores: NDArray[np.float32], slots: Integers
    ) -> Integers:
        """Return the slots found by the GPU, or scan if its last score is so close to the k-th that an equal one may be
        missing."""
        live = ~np.isin(slots, dead)
        enough = np.count_nonzero(live) >= k >= 1 and scores[live][k - 1] - scores[-1] > 2 * STEP + GPU_ROUNDING
        if enough or len(slots) == self.size:
            return slots[live]
        return self._scan.find(query[None], [k], [dead])[0]


def _add(index: Any, vectors: NDArray[np.float16], rows: Integers) -> None:
    for start in range(0, len(rows), BLOCK):
        index.add(vectors[rows[start : start + BLOCK]].astype(np.float32))


def _faiss() -> Any:
    with optional("dense"):
        import faiss
    return faiss


@contextmanager
def _as_fault(task: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CorpusError(f"cannot {task}: {error}") from error


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
