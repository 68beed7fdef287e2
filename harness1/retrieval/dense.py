"""Search by embeddings: the best chunks by cosine, in the total order, independent of the batch.

Candidates are found roughly: by products in single precision, on a GPU too, or by a graph (HNSW) of faiss. Their
cosines are then computed row by row in double precision, so that neither batch nor machine matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
GPU_MOST = 2048
GPU_ROUNDING = 2.0**-9
"""The largest joint error of two products of vectors of length 1 on a GPU that cuts fractions to 10 bits (TF32)."""
HNSW_LINKS, HNSW_BUILD, HNSW_SEARCH = 32, 200, 128
"""Links of each vector in a graph, and candidates compared while it is built and kept while it is searched."""

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Integers = NDArray[np.integer[Any]]
Find = Callable[[Floats, Sequence[int], Sequence[Integers]], list[Integers]]
"""Returns for each query [d], of length 1, the slots of its best `k` rows, of all that may equal them, and possibly of
others, without its dead slots (ascending). A slot is the place of a row among `find_used_rows`."""


def find_used_rows(rows: Integers) -> Integers:
    """Return the distinct rows of chunks, ascending; a negative number means that a chunk has no row."""
    used = np.zeros(rows.max(initial=-1) + 1, dtype=bool)
    used[rows[rows >= 0]] = True
    return np.flatnonzero(used).astype(np.int32)


class DenseIndex:
    """The embeddings of a corpus: `vectors` [rows, d] of length 1 or 0; for each position its row, negative if it is
    never found, and the rank of its id, which breaks ties. `find`: None multiplies all. Raises CorpusError."""

    def __init__(self, vectors: Halves, rows: Integers, ranks: NDArray[np.int32], find: Find | None = None) -> None:
        if rows.max(initial=-1) >= len(vectors):
            raise CorpusError(f"a chunk has the embedding {rows.max()} of {len(vectors)}; build the index again")
        self._vectors, self._ranks = vectors, ranks
        self._used = find_used_rows(rows)
        self._find = find or partial(scan, vectors, self._used)
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
        dead: list[Integers] = []
        for exclude in excludes:
            gone, times = np.unique(self._slots[exclude], return_counts=True)
            dead.append(gone[(gone >= 0) & (times == self._counts[gone])] if len(self._used) else gone[:0])
        best = []
        candidates = self._find(queries, ks, dead)
        for query, slots, k, exclude in zip(queries, candidates, ks, excludes, strict=True):
            counts = self._counts[slots]
            firsts = np.repeat(self._ends[slots] - np.cumsum(counts), counts)
            positions = self._positions[firsts + np.arange(len(firsts))]
            scores = np.repeat(_cosines(query, self._vectors, self._used[slots]), counts)
            kept = ~np.isin(positions, exclude)
            positions, scores = positions[kept], scores[kept]
            order = best_first(scores, self._ranks[positions], max(k, 0))
            best.append(list(zip(positions[order].tolist(), scores[order].tolist(), strict=True)))
        return best

    def cosines(self, query: Floats, positions: Integers) -> NDArray[np.float64]:
        """Return the cosine of a query of length 1 with the chunk at each position; 0 for a chunk without a row."""
        slots = self._slots[positions]
        found = np.zeros(len(positions))
        found[slots >= 0] = _cosines(query, self._vectors, self._used[slots[slots >= 0]])
        return found


def scan(
    vectors: Halves, used: Integers, queries: Floats, ks: Sequence[int], dead: Sequence[Integers]
) -> list[Integers]:
    """Multiply every used row, and return all slots whose product may be among the `k` best, or near the last."""
    # Two products of vectors of about length 1 err by 2^-24 for each dimension at most (Higham, "Accuracy and
    # stability of numerical algorithms", 3.1), doubled for "about".
    margin = 2 * STEP + 4 * queries.shape[1] * 2.0**-24

    def keep(at: int) -> tuple[NDArray[np.int64], Floats]:
        """Drop the candidates of a query that no longer count, and raise the floor for later ones."""
        slots, scores = map(np.concatenate, zip(*found[at], strict=True))
        if len(scores) >= ks[at] > 0:
            floors[at] = float(np.partition(scores, -ks[at])[-ks[at]]) - margin
            slots, scores = slots[scores > floors[at]], scores[scores > floors[at]]
        found[at] = [(slots, scores)]
        return slots, scores

    halves = vectors.view(np.int16)
    wide = np.empty((min(BLOCK, len(used)), queries.shape[1]), dtype=np.float32)
    floors = [-np.inf if k > 0 else np.inf for k in ks]
    found = [[(np.empty(0, np.int64), np.empty(0, np.float32))] for _ in ks]
    room = [0] * len(ks)
    for start in range(0, len(used), BLOCK):
        rows = used[start : start + BLOCK]
        first, last = int(rows[0]), int(rows[-1])  # no copy if all between them are in use
        block = halves[first : last + 1] if last - first < len(rows) else halves[rows]
        for at, scores in enumerate(_products(block, queries, wide)):
            low, high = np.searchsorted(dead[at], (start, start + len(rows)))
            scores[dead[at][low:high] - start] = -np.inf
            above = np.flatnonzero(scores > floors[at])
            found[at].append((above + start, scores[above]))
            room[at] -= len(above)
            if room[at] < 0:
                keep(at)
                room[at] = max(ks[at], FILLED)
    return [keep(at)[0] for at in range(len(ks))]


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


def write_graph(path: Path, vectors: Halves, used: Integers, before: tuple[Path, Integers] | None = None) -> None:
    """Write an HNSW graph over the used rows, in half precision, for the inner product. It extends the one `before`,
    over these rows, if all of them come first. Equal rows make equal bytes. Raises MissingExtra; CorpusError."""
    faiss = _faiss()
    threads, dimensions = faiss.omp_get_max_threads(), vectors.shape[1]
    faiss.omp_set_num_threads(1)
    try:
        if before and np.array_equal(used[: len(before[1])], before[1]):
            graph = faiss.read_index(str(before[0]))
        else:
            half, metric = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
            graph = faiss.IndexHNSWSQ(dimensions, half, HNSW_LINKS, metric)
            graph.hnsw.efConstruction = HNSW_BUILD
            graph.train(np.zeros((1, dimensions), dtype=np.float32))
        _add(graph, vectors, used[graph.ntotal :])
        faiss.write_index(graph, str(path))
    except RuntimeError as error:  # which names the file
        raise CorpusError(f"cannot write {path}: {error}") from error
    finally:
        faiss.omp_set_num_threads(threads)


def open_graph(path: Path, size: int) -> Find:
    """Map what `write_graph` wrote. Raises MissingExtra; CorpusError: it is damaged, or not over `size` rows."""
    faiss = _faiss()
    try:
        graph = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise CorpusError(f"cannot read {path}: {error}") from error
    if graph.ntotal != size:
        had = f"the approximate index has {graph.ntotal} vectors, and the corpus {size}"
        raise CorpusError(f"{had}; build the index again")

    def find(queries: Floats, ks: Sequence[int], dead: Sequence[Integers]) -> list[Integers]:
        found: list[Integers] = []
        for query, k, gone in zip(queries, ks, dead, strict=True):  # one at a time: none depends on the batch
            count = min(2 * k + SPARE, graph.ntotal)
            chosen = {"sel": faiss.IDSelectorNot(faiss.IDSelectorBatch(gone.astype(np.int64)))} if len(gone) else {}
            # The walk passes excluded rows, often the nearest.
            parameters = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, count) + len(gone), **chosen)
            slots: NDArray[np.int64] = graph.search(query[None], count, params=parameters)[1][0]
            found.append(slots[slots >= 0])
        return found

    return find


def open_gpu(vectors: Halves, rows: Integers) -> Find | None:
    """Return exact search on the first GPU, or None if faiss is not installed for GPUs or sees none."""
    if find_spec("faiss") is None:
        return None
    faiss = _faiss()
    if not getattr(faiss, "get_num_gpus", int)():
        return None
    used = find_used_rows(rows)
    index = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), vectors.shape[1])
    _add(index, vectors, used)
    return partial(search_gpu, index, vectors, used)


def search_gpu(
    index: Any, vectors: Halves, used: Integers, queries: Floats, ks: Sequence[int], dead: Sequence[Integers]
) -> list[Integers]:
    """Search a flat faiss index on a GPU, which excludes no rows. Exact: a query with too many near ties is scanned."""
    wanted = 2 * max(k + len(slots) for k, slots in zip(ks, dead, strict=True)) + SPARE
    found = []
    nearest = zip(*index.search(queries, min(wanted, GPU_MOST, len(used))), strict=True)
    for at, (scores, slots) in enumerate(nearest):
        k, live = ks[at], ~np.isin(slots, dead[at])
        enough = np.count_nonzero(live) >= k >= 1 and scores[live][k - 1] - scores[-1] > 2 * STEP + GPU_ROUNDING
        if enough or len(slots) == len(used):
            found.append(slots[live])
        else:
            found += scan(vectors, used, queries[[at]], [k], [dead[at]])
    return found


def _add(index: Any, vectors: Halves, rows: Integers) -> None:
    for start in range(0, len(rows), BLOCK):
        index.add(vectors[rows[start : start + BLOCK]].astype(np.float32))


def _faiss() -> Any:
    with optional("dense"):
        import faiss
    return faiss
