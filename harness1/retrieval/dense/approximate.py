"""Search by embeddings through faiss: graphs (HNSW) and lists (IVF) that skip most rows, and exact search on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness1 import config
from harness1.errors import CorpusError, optional
from harness1.retrieval.dense.search import BLOCK, Integers, Scan, used_rows
from harness1.retrieval.dense.vectors import Vectors
from harness1.retrieval.ordering import STEP

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
    dimensions = vectors.shape[1]
    with _one_thread(faiss):
        if settings.search == "hnsw":
            links, metric = settings.hnsw_links, faiss.METRIC_INNER_PRODUCT
            index = faiss.IndexHNSWSQ(dimensions, faiss.ScalarQuantizer.QT_fp16, links, metric)
            index.hnsw.efConstruction = settings.hnsw_build
            index.train(np.zeros((1, dimensions), dtype=np.float32))
        else:
            index = _trained_lists(faiss, vectors, used, settings.ivf_lists)
        _add(index, vectors, used)
    with _as_fault(f"write {path}"):
        faiss.write_index(index, str(path))


def extend_approximate(
    before: Path, before_used: Integers, vectors: NDArray[np.float16], used: Integers, path: Path
) -> bool:
    """Write an earlier index with the rows added since; return False if a row was removed or rows more than doubled.

    Args:
        before_used: the used rows of the index at `before`.

    Raises:
        MissingExtra, CorpusError: as `build_approximate`, or the earlier index is not there.
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
            walk = max(settings.hnsw_search, count) + len(dead)
            parameters = faiss.SearchParametersHNSW(efSearch=walk, **chosen)
        else:
            parameters = faiss.SearchParametersIVF(nprobe=settings.ivf_probes, **chosen)
        slots: NDArray[np.int64] = self._index.search(query[None], count, params=parameters)[1][0]
        return slots[slots >= 0]


def open_gpu(vectors: Vectors, rows: Integers) -> GpuScan | None:
    """Return exact search on the first GPU, or None if faiss is not installed for GPUs or sees none.

    Raises:
        DamagedFile: the embeddings are not as they were written.
    """
    if find_spec("faiss") is None:
        return None
    faiss = _faiss()
    if not getattr(faiss, "get_num_gpus", int)():
        return None
    used, values = used_rows(rows), vectors.values
    vectors.check()
    index = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), values.shape[1])
    _add(index, values, used)
    return GpuScan(index, Scan(values, used))


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
        return [self._checked(*each) for each in zip(queries, ks, dead, scores, slots, strict=True)]

    def _checked(
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


def _trained_lists(faiss: Any, vectors: NDArray[np.float16], used: Integers, lists: int) -> Any:
    """Return an IVF whose centres are trained on evenly spaced rows."""
    count = max(1, min(lists or int(4 * len(used) ** 0.5), len(used)))
    dimensions, metric = vectors.shape[1], faiss.METRIC_INNER_PRODUCT
    centres = faiss.IndexFlatIP(dimensions)
    index = faiss.IndexIVFScalarQuantizer(centres, dimensions, count, faiss.ScalarQuantizer.QT_fp16, metric, False)
    index.cp.spherical = True
    index.cp.min_points_per_centroid = 1  # faiss writes warnings to stderr about small corpora
    sample = used[:: max(1, len(used) // (SAMPLED * count))]
    index.train(vectors[sample].astype(np.float32))
    return index


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
