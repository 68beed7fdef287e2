"""Search by embeddings: the best chunks by cosine, in the total order, independent of the batch.

Candidates are found roughly: by products in single precision, on a GPU too, or by graphs (HNSW) or lists (IVF) of
faiss. Their cosines are then computed row by row in double precision, so that neither batch nor machine matters."""

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
GPU_ROUNDING = 2.0**-9
"""The largest joint error of two products of vectors of length 1 on a GPU that cuts fractions to 10 bits (TF32)."""

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Integers = NDArray[np.integer[Any]]

HNSW_LINKS, HNSW_BUILD, HNSW_SEARCH = 32, 200, 128
"""Links of each vector in a graph, and candidates compared while it is built and kept while it is searched."""
IVF_PROBES = 32
"""Lists that a search reads: more find more and take longer."""


class RowSearcher(Protocol):
    """Finds the slots where the best rows may be. A slot is the place of a row among `find_used_rows`."""

    size: int

    def find(self, queries: Floats, ks: Sequence[int], dead: Sequence[Integers]) -> list[Integers]:
        """Return for each query [d], of length 1, the slots of its best `k` rows, of all that may equal them, and
        possibly of others, without its dead slots (ascending)."""
        ...


def find_used_rows(rows: Integers) -> Integers:
    """Return the distinct rows of chunks, ascending; a negative number means that a chunk has no row."""
    used = np.zeros(rows.max(initial=-1) + 1, dtype=bool)
    used[rows[rows >= 0]] = True
    return np.flatnonzero(used).astype(np.int32)


class DenseIndex:
    """The embeddings of a corpus: `vectors` [rows, d] of length 1 or 0; for each position its row, negative if it is
    never found, and the rank of its id, which breaks ties. `candidates` searches `find_used_rows`; None multiplies
    every row. Raises CorpusError: the approximate index was built from other vectors, or a row does not exist."""

    def __init__(
        self, vectors: Halves, rows: Integers, ranks: NDArray[np.int32], candidates: RowSearcher | None = None
    ) -> None:
        if rows.max(initial=-1) >= len(vectors):
            raise CorpusError(f"a chunk has the embedding {rows.max()} of {len(vectors)}; build the index again")
        self._vectors, self._ranks = vectors, ranks
        self._used = find_used_rows(rows)
        self._candidates = candidates or Scan(vectors, self._used)
        if self._candidates.size != len(self._used):
            had = f"the approximate index has {self._candidates.size} vectors, and the corpus {len(self._used)}"
            raise CorpusError(f"{had}; build the index again")
        slots = np.zeros(len(vectors) + 1, dtype=np.int32)  # the last is for -1, where there are no vectors
        slots[self._used] = np.arange(len(self._used))
        self._slots = np.where(rows >= 0, slots[np.maximum(rows, -1)], -1).astype(np.int32)
        order = np.argsort(self._slots, kind="stable")
        self._positions = order[np.count_nonzero(rows < 0) :].astype(np.int32)
        self._counts = np.bincount(self._slots[self._positions], minlength=len(self._used)).astype(np.int32)
        self._ends = np.cumsum(self._counts, dtype=np.int32)

    def search(self, queries: Floats, ks: Sequence[int], excludes: Sequence[Integers]) -> list[list[tuple[int, float]]]:
        """Return for each query [d], of length 1, the positions of its best `k` chunks with their cosines, in the total
        order. Excluded positions are left out, also from the top score, to which the order is relative."""
        best = []
        candidates = self._candidates.find(queries, ks, [self._dead(exclude) for exclude in excludes])
        for query, slots, k, exclude in zip(queries, candidates, ks, excludes, strict=True):
            counts = self._counts[slots]
            firsts = np.repeat(self._ends[slots] - np.cumsum(counts), counts)
            positions = self._positions[firsts + np.arange(len(firsts))]
            scores = np.repeat(_cosines(query, self._vectors, self._used[slots]), counts)
            kept = ~np.isin(positions, exclude)
            positions, scores = positions[kept], scores[kept]
            order = best_first(scores, self._ranks[positions], k)
            best.append(list(zip(positions[order].tolist(), scores[order].tolist(), strict=True)))
        return best

    def cosines(self, query: Floats, positions: Integers) -> NDArray[np.float64]:
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


class Scan:
    """Exact search: multiplies every row in use, block by block."""

    def __init__(self, vectors: Halves, used: Integers) -> None:
        self._vectors, self._used = vectors.view(np.int16), used
        self.size = len(used)

    def find(self, queries: Floats, ks: Sequence[int], dead: Sequence[Integers]) -> list[Integers]:
        """Return all slots whose product may be among the `k` best or share the level of the last of them."""
        # Two products of vectors of about length 1 err by 2^-24 for each dimension at most (Higham, "Accuracy and
        # stability of numerical algorithms", 3.1), doubled for "about".
        margin = 2 * STEP + 4 * queries.shape[1] * 2.0**-24
        best = [_Best(k, margin, slots) for k, slots in zip(ks, dead, strict=True)]
        wide = np.empty((min(BLOCK, self.size), queries.shape[1]), dtype=np.float32)
        for start in range(0, self.size, BLOCK):
            rows = self._used[start : start + BLOCK]
            first, last = int(rows[0]), int(rows[-1])  # no copy if all between them are in use
            halves = self._vectors[first : last + 1] if last - first < len(rows) else self._vectors[rows]
            for one, scores in zip(best, _products(halves, queries, wide), strict=True):
                one.add(start, scores)
        return [one.slots() for one in best]


class _Best:
    """The slots seen so far that score within a margin of the k-th best, or better."""

    def __init__(self, k: int, margin: float, dead: Integers) -> None:
        self._k, self._margin, self._dead = k, margin, dead
        self._slots: list[Integers] = [np.empty(0, dtype=np.int64)]
        self._scores: list[Floats] = [np.empty(0, dtype=np.float32)]
        self._floor = -np.inf if k > 0 else np.inf
        self._room = 0

    def add(self, start: int, scores: Floats) -> None:
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
        slots, scores = np.concatenate(self._slots), np.concatenate(self._scores)
        if len(scores) >= self._k > 0:
            self._floor = float(np.partition(scores, -self._k)[-self._k]) - self._margin
            kept = scores > self._floor
            slots, scores = slots[kept], scores[kept]
        self._slots, self._scores = [slots], [scores]
        return slots


def _products(halves: NDArray[np.int16], queries: Floats, wide: Floats) -> Floats:
    from harness1.retrieval.kernels import dots, widen

    if len(queries) <= FEW:
        products = np.empty((len(queries), len(halves)), dtype=np.float32)
        for query, out in zip(queries, products, strict=True):
            dots(halves, query, out)
        return products
    widen(halves, wide[: len(halves)])
    return np.ascontiguousarray((wide[: len(halves)] @ queries.T).T)


def _cosines(query: Floats, vectors: Halves, rows: Integers) -> NDArray[np.float64]:
    """Return products with rows in double precision, each summed by itself: a matrix product may round by shape."""
    cosines = np.empty(len(rows), dtype=np.float64)
    wide = query.astype(np.float64)
    for start in range(0, len(rows), BLOCK):
        block = slice(start, start + BLOCK)
        cosines[block] = (vectors[rows[block]] * wide).sum(axis=1)
    return cosines


def build_approximate(vectors: Halves, used: Integers, settings: config.Dense, path: Path) -> None:
    """Write an HNSW or IVF index (`settings.search`) over the used rows, in half precision, for the inner product. One
    thread and fixed seeds make equal bytes. Raises MissingExtra; CorpusError: the file cannot be written."""
    faiss = _faiss()
    dimensions, metric = vectors.shape[1], faiss.METRIC_INNER_PRODUCT
    with _one_thread(faiss):
        if settings.search == "hnsw":
            index = faiss.IndexHNSWSQ(dimensions, faiss.ScalarQuantizer.QT_fp16, HNSW_LINKS, metric)
            index.hnsw.efConstruction = HNSW_BUILD
            index.train(np.zeros((1, dimensions), dtype=np.float32))
        else:
            count = max(1, min(int(4 * len(used) ** 0.5), len(used)))
            flat, half = faiss.IndexFlatIP(dimensions), faiss.ScalarQuantizer.QT_fp16
            index = faiss.IndexIVFScalarQuantizer(flat, dimensions, count, half, metric, False)
            index.cp.spherical = True
            index.cp.min_points_per_centroid = 1  # faiss writes warnings to stderr about small corpora
            evenly = used[:: max(1, len(used) // (SAMPLED * count))]
            index.train(vectors[evenly].astype(np.float32))
        _add(index, vectors, used)
    _write(faiss, index, path)


def extend_approximate(before: Path, before_used: Integers, vectors: Halves, used: Integers, path: Path) -> bool:
    """Write an earlier index, over `before_used`, with the rows added since; return False if a row was removed or rows
    more than doubled. Raises MissingExtra; CorpusError: a file cannot be read or written."""
    size = len(before_used)
    if not np.array_equal(used[:size], before_used) or len(used) > GROWTH * size:
        return False
    faiss = _faiss()
    with _as_fault(f"read {before}"):
        index = faiss.read_index(str(before))
    with _one_thread(faiss):
        _add(index, vectors, used[size:])
    _write(faiss, index, path)
    return True


def open_approximate(path: Path, settings: config.Dense) -> Approximate:
    """Map what `build_approximate` wrote. Raises MissingExtra; CorpusError: the file is missing or damaged."""
    faiss = _faiss()
    flag = faiss.IO_FLAG_MMAP_IFC if settings.search == "hnsw" else faiss.IO_FLAG_MMAP
    with _as_fault(f"read {path}"):
        return Approximate(faiss, faiss.read_index(str(path), flag), settings)


class Approximate:
    """`RowSearcher` of an HNSW or IVF index. Queries are searched one at a time, so no result depends on the batch."""

    def __init__(self, faiss: Any, index: Any, settings: config.Dense) -> None:
        self._faiss, self._index, self._settings = faiss, index, settings
        self.size: int = index.ntotal

    def find(self, queries: Floats, ks: Sequence[int], dead: Sequence[Integers]) -> list[Integers]:
        return [self._find(*each) for each in zip(queries, ks, dead, strict=True)]

    def _find(self, query: Floats, k: int, dead: Integers) -> Integers:
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


def open_gpu(vectors: Halves, rows: Integers) -> GpuScan | None:
    """Return exact search on the first GPU, or None if faiss is not installed for GPUs or sees none."""
    if find_spec("faiss") is None:
        return None
    faiss = _faiss()
    if not getattr(faiss, "get_num_gpus", int)():
        return None
    used = find_used_rows(rows)
    index = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), vectors.shape[1])
    _add(index, vectors, used)
    return GpuScan(index, Scan(vectors, used))


class GpuScan:
    """`RowSearcher` of a flat faiss index on a GPU, which cannot exclude rows, so many more are fetched. It is exact: a
    query with more near ties than a GPU returns is scanned."""

    def __init__(self, index: Any, scan: Scan) -> None:
        self._index, self._scan = index, scan
        self.size = scan.size

    def find(self, queries: Floats, ks: Sequence[int], dead: Sequence[Integers]) -> list[Integers]:
        wanted = 2 * max(k + len(slots) for k, slots in zip(ks, dead, strict=True)) + SPARE
        scores, slots = self._index.search(queries, min(wanted, GPU_MOST, self.size))
        return [self._verify(*each) for each in zip(queries, ks, dead, scores, slots, strict=True)]

    def _verify(self, query: Floats, k: int, dead: Integers, scores: Floats, slots: Integers) -> Integers:
        live = ~np.isin(slots, dead)
        enough = np.count_nonzero(live) >= k >= 1 and scores[live][k - 1] - scores[-1] > 2 * STEP + GPU_ROUNDING
        if enough or len(slots) == self.size:
            return slots[live]
        return self._scan.find(query[None], [k], [dead])[0]


def _add(index: Any, vectors: Halves, rows: Integers) -> None:
    for start in range(0, len(rows), BLOCK):
        index.add(vectors[rows[start : start + BLOCK]].astype(np.float32))


def _faiss() -> Any:
    with optional("dense"):
        import faiss
    return faiss


def _write(faiss: Any, index: Any, path: Path) -> None:
    with _as_fault(f"write {path}"):
        faiss.write_index(index, str(path))


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
