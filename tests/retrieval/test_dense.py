"""Search by embeddings against the plainest way to do it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness1.errors import CorpusError
from harness1.records import ChunkId
from harness1.retrieval import dense
from harness1.retrieval.dense import DenseIndex, Find, find_used_rows, open_graph, search_gpu, write_graph
from harness1.retrieval.protocol import total_order

NONE = np.empty(0, dtype=np.int32)
GONE = np.array([-1, -1], dtype=np.int32)


def unit(vectors: NDArray[Any]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def cloud(count: int, dimensions: int = 24, seed: int = 0) -> NDArray[np.float32]:
    """Vectors around a few centres."""
    centres = np.random.default_rng(0).standard_normal((8, dimensions))
    draw = np.random.default_rng(seed + 1)
    return unit(centres[draw.integers(0, 8, count)] + 0.5 * draw.standard_normal((count, dimensions)))


def indexed(vectors: NDArray[np.float32], find: Find | None = None) -> DenseIndex:
    count = len(vectors)
    return DenseIndex(vectors.astype(np.float16), np.arange(count), np.arange(count, dtype=np.int32), find)


def naive(
    vectors: NDArray[np.float16], rows: NDArray[Any], ranks: NDArray[Any], query: NDArray[Any], k: int, out: set[int]
) -> list[int]:
    """Every product in double precision, then the order of all rankings."""
    scored = [
        (ChunkId(f"{ranks[at]:06d} {at}"), float((vectors[row].astype(np.float64) * query.astype(np.float64)).sum()))
        for at, row in enumerate(rows)
        if row >= 0 and at not in out
    ]
    return [int(chunk_id.split()[1]) for chunk_id, _ in total_order(scored, k)]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[Any, ...]:
    """Few distinct coordinates and shared rows, so that scores often tie; rows of zeros, unused and missing ones."""
    numbers = st.integers(-2, 2)
    distinct = draw(st.integers(1, 12))
    vectors = np.array(draw(st.lists(st.tuples(*[numbers] * 4), min_size=distinct, max_size=distinct)), dtype=float)
    noise = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(vectors.shape)
    vectors += draw(st.sampled_from([0, 1e-5, 1e-4, 1e-3])) * noise
    rows = np.array(draw(st.lists(st.integers(-1, distinct - 1), max_size=40)), dtype=np.int32)
    ranks = np.array(draw(st.permutations(range(len(rows)))), dtype=np.int32)
    queries = np.array(draw(st.lists(st.tuples(*[numbers] * 4), min_size=1, max_size=5)), dtype=float)
    ks = [draw(st.integers(0, 12)) for _ in queries]
    outs = [draw(st.sets(st.integers(0, max(0, len(rows) - 1)), max_size=len(rows))) for _ in queries]
    return unit(vectors).astype(np.float16), rows, ranks, unit(queries), ks, outs


@settings(deadline=None, max_examples=60)
@given(corpora(), st.sampled_from([2, 5, 4096]))
def test_the_best_are_those_of_the_plainest_search(corpus: tuple[Any, ...], block: int) -> None:
    vectors, rows, ranks, queries, ks, outs = corpus
    excludes = [np.array(sorted(out), dtype=np.int32) for out in outs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "BLOCK", block)
        found = DenseIndex(vectors, rows, ranks).search(queries, ks, excludes)
    for query, k, out, result in zip(queries, ks, outs, found, strict=True):
        assert [position for position, _ in result] == naive(vectors, rows, ranks, query, k, out)


def test_scores_are_cosines_and_may_be_negative() -> None:
    vectors = unit(np.array([[1, 0], [1, 1], [-1, 0]]))
    (found,) = indexed(vectors).search(vectors[:1], [3], [NONE])
    assert dict(found) == pytest.approx({0: 1, 1: 2**-0.5, 2: -1}, abs=1e-3)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 30])
def test_a_batch_changes_no_bit(size: int) -> None:
    index, queries = indexed(cloud(9000)), cloud(30, seed=1)
    draw = np.random.default_rng(2)
    excludes = [np.unique(draw.integers(0, 9000, count)).astype(np.int32) for count in range(0, 300, 10)]
    ks = [1 + at % 50 for at in range(30)]
    together = index.search(queries, ks, excludes)
    apart = []
    for start in range(0, 30, size):
        part = slice(start, start + size)
        apart += index.search(queries[part], ks[part], excludes[part])
    assert apart == together
    for found, k, exclude in zip(together, ks, excludes, strict=True):
        assert len(found) == k
        assert not {position for position, _ in found} & set(exclude.tolist())


def test_half_precision_is_read_exactly() -> None:
    from harness1.retrieval.kernels import dots, widen

    every = np.arange(-(2**15), 2**15, dtype=np.int16)
    every = every[np.isfinite(every.view(np.float16))].reshape(-1, 32)
    wide = np.empty(every.shape, dtype=np.float32)
    widen(every, wide)
    assert np.array_equal(wide, every.view(np.float16).astype(np.float32))
    small = unit(np.random.default_rng(0).standard_normal((50, 384))).astype(np.float16)
    products = np.empty(50, dtype=np.float32)
    dots(small.view(np.int16), small[7].astype(np.float32), products)
    assert np.abs(products - small.astype(np.float64) @ small[7].astype(np.float64)).max() < 1e-6


def test_an_index_without_chunks_finds_nothing() -> None:
    for vectors, rows in ((cloud(3), NONE), (cloud(3), GONE), (cloud(0), GONE), (cloud(0), NONE)):
        index = DenseIndex(vectors.astype(np.float16), rows, np.arange(len(rows), dtype=np.int32))
        assert index.search(cloud(2), [5, 0], [NONE, NONE]) == [[], []]


def test_a_graph_finds_nearly_the_same_and_nothing_excluded(tmp_path: Path) -> None:
    vectors, queries = cloud(3000), cloud(20, seed=1)
    for name in ("dense.faiss", "other"):
        write_graph(tmp_path / name, vectors.astype(np.float16), np.arange(3000))
    assert (tmp_path / "dense.faiss").read_bytes() == (tmp_path / "other").read_bytes()
    graph = indexed(vectors, open_graph(tmp_path / "dense.faiss", 3000))
    nearest = indexed(vectors).search(queries, [600] * 20, [NONE] * 20)
    best = [np.array([position for position, _ in found], dtype=np.int32) for found in nearest]
    for excludes in ([NONE] * 20, best):
        exact = indexed(vectors).search(queries, [10] * 20, excludes)
        found = graph.search(queries, [10] * 20, excludes)
        shared = [len(set(one) & set(other)) for one, other in zip(exact, found, strict=True)]
        assert sum(shared) >= 190
        for hits, exclude in zip(found, excludes, strict=True):
            assert not {position for position, _ in hits} & set(exclude.tolist())
    together = graph.search(queries, [10] * 20, best)
    assert together == [graph.search(queries[[at]], [10], [best[at]])[0] for at in range(20)]


def test_a_graph_holds_the_rows_in_use_and_a_damaged_or_missing_one_is_named(tmp_path: Path) -> None:
    vectors = cloud(60).astype(np.float16)
    rows = np.array([50, 7, -1, 7, 30], dtype=np.int32)
    write_graph(tmp_path / "dense.faiss", vectors, find_used_rows(rows))
    index = DenseIndex(vectors, rows, np.arange(5, dtype=np.int32), open_graph(tmp_path / "dense.faiss", 3))
    (found,) = index.search(vectors[[7]].astype(np.float32), [9], [np.array([1])])
    assert {position for position, _ in found} == {0, 3, 4}
    assert found[0][0] == 3
    with pytest.raises(CorpusError, match="3 vectors"):
        open_graph(tmp_path / "dense.faiss", 5)
    (tmp_path / "damaged.faiss").write_bytes(b"not an index")
    for name in ("absent.faiss", "damaged.faiss"):
        with pytest.raises(CorpusError, match=name):
            open_graph(tmp_path / name, 3)
    for name, before in (("absent/new", None), ("new", (tmp_path / "absent.faiss", np.array([7])))):
        with pytest.raises(CorpusError, match=r"cannot write .*absent"):
            write_graph(tmp_path / name, vectors, find_used_rows(rows), before)


def test_few_candidates_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    partition = np.partition
    monkeypatch.setattr(np, "partition", lambda scores, at: held.append(len(scores)) or partition(scores, at))
    monkeypatch.setattr(dense, "BLOCK", 64)
    assert len(indexed(cloud(3000)).search(cloud(1), [300], [NONE])[0]) == 300
    assert max(held) < 1000


@pytest.mark.parametrize("copies", [1, 2100], ids=["distinct", "more equals than a GPU returns"])
def test_what_a_gpu_finds_is_completed_to_the_exact_answer(copies: int) -> None:
    """A flat index on the CPU stands in for the one on a GPU: both return the nearest, and know no exclusions."""
    import faiss

    vectors = np.repeat(cloud(3000 // copies + 1), copies, axis=0)
    half, queries = vectors.astype(np.float16), cloud(6, seed=1)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(half.astype(np.float32))
    used = find_used_rows(np.arange(len(vectors)))
    excludes = [np.arange(0, 40 * at, 2) for at in range(6)]
    ranks = np.arange(len(vectors), dtype=np.int32)[::-1]
    exact = DenseIndex(half, used, ranks).search(queries, [20] * 6, excludes)
    gpu = DenseIndex(half, used, ranks, partial(search_gpu, flat, half, used))
    assert gpu.search(queries, [20] * 6, excludes) == exact
