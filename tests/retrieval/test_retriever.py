"""Ranking over a real index: fusion against the formula, reranking, and batches that change nothing."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
import time
import zlib
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness1 import config
from harness1.config import Config, Dense, Env, Index, Rerank, Retrieval, load_config
from harness1.errors import ConfigError, CorpusError
from harness1.records import ChunkId, DocId
from harness1.retrieval.build import add_documents, build_index
from harness1.retrieval.corpus import Document
from harness1.retrieval.index import open_index
from harness1.retrieval.models import EncodingEmbedder, HashEmbedder
from harness1.retrieval.protocol import (
    RetrievalFault,
    Retriever,
    Scored,
    SearchRequest,
    SearchResult,
    best_first,
    rrf,
    total_order,
)
from harness1.retrieval.retriever import EmbeddedRetriever, open_embedded
from harness1.retrieval.served import Pair
from tests.retrieval.test_contract import ids as found
from tests.retrieval.test_contract import search as look
from tests.support import WORDS

SIZE = 64
QUERIES = ["river castle", "Ada wrote an engine", "the king of Paris", "war 1824 poet", "rain"]
BOTH = ["bm25", "dense"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of 80 documents, longer and shorter ones, of a few words."""
    draw = random.Random(0)
    documents = [
        Document(
            doc_id=DocId(f"d{number:02}"),
            title=draw.choice(WORDS),
            text=" ".join(draw.choices(WORDS, k=draw.choice([3, 8, 20, 60]))),
        )
        for number in range(80)
    ]
    path = tmp_path_factory.mktemp("hybrid")
    build_index(documents, path, Index(dense=Dense(model=f"hash:{SIZE}")))
    return path


class Scorer:
    """Gives every pair a probability of its own, and remembers the sizes of its calls."""

    hash = "scorer"

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.calls: list[int] = []

    def score(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        time.sleep(self.seconds)
        self.calls.append(len(pairs))
        return np.array([self.chance(*pair) for pair in pairs], dtype=np.float32)

    def chance(self, query: str, text: str) -> float:
        return (1 + zlib.crc32(f"{query}|{text}".encode()) % 998) / 1000


def reranking(folder: Path, scorer: Scorer) -> EmbeddedRetriever:
    settings = Retrieval(rerank=Rerank(on=True))
    return EmbeddedRetriever(open_index(folder), settings, HashEmbedder(SIZE), scorer)


def requests(count: int) -> list[SearchRequest]:
    """Different queries, numbers of hits and exclusions; some queries come again."""
    return [
        SearchRequest(
            QUERIES[number % len(QUERIES)],
            1 + 3 * number % 17,
            frozenset(ChunkId(f"d{other:02}") for other in range(0, number * 3 % 50, 2)),
        )
        for number in range(count)
    ]


def answers(retriever: EmbeddedRetriever, asked: Sequence[SearchRequest]) -> list[SearchResult]:
    found = asyncio.run(retriever.search(asked))
    assert all(isinstance(each, SearchResult) for each in found)
    return [each for each in found if isinstance(each, SearchResult)]


def search(
    folder: Path, query: str, k: int, exclude: frozenset[ChunkId] = frozenset(), **settings: Any
) -> list[tuple[ChunkId, float]]:
    retriever = open_embedded(folder, Config(env=Env(retrieval=Retrieval(**settings))))
    (result,) = answers(retriever, [SearchRequest(query, k, exclude)])
    return [(hit.chunk.chunk_id, hit.score) for hit in result.hits]


def ids(found: Sequence[tuple[ChunkId, float]]) -> list[ChunkId]:
    return [chunk_id for chunk_id, _ in found]


def fused(lists: Sequence[Sequence[ChunkId]], k: float) -> list[tuple[ChunkId, float]]:
    """Reciprocal rank fusion, written out; scores equal to 1e-4 of the best go by id."""
    scores = {
        chunk_id: sum(1 / (k + found.index(chunk_id) + 1) for found in lists if chunk_id in found)
        for chunk_id in set().union(*lists)
    }
    step = max(scores.values()) * 1e-4
    return sorted(scores.items(), key=lambda scored: (-round(scored[1] / step), scored[0]))


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(("k", "rrf_k", "depths"), [(3, 60, (25, 25)), (40, 5, (25, 25)), (10, 60, (4, 30))])
def test_a_hybrid_ranking_is_the_fusion_of_the_two_lists(
    folder: Path, monkeypatch: pytest.MonkeyPatch, query: str, k: int, rrf_k: int, depths: tuple[int, int]
) -> None:
    lists = [ids(search(folder, query, max(depth, k), mode=mode)) for mode, depth in zip(BOTH, depths, strict=True)]
    expected = fused(lists, rrf_k)[:k]
    for name, value in (("RRF_K", rrf_k), ("BM25_DEPTH", depths[0]), ("DENSE_DEPTH", depths[1])):
        monkeypatch.setattr(f"harness1.retrieval.retriever.{name}", value)
    found = search(folder, query, k)
    assert set(lists[0]) != set(lists[1])
    assert ids(found) == ids(expected)
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])


def test_those_behind_excluded_chunks_move_up_in_both_lists(folder: Path) -> None:
    exclude = frozenset(ids(search(folder, QUERIES[0], 6)))
    lists = [[name for name in ids(search(folder, QUERIES[0], 80, mode=mode)) if name not in exclude] for mode in BOTH]
    found = search(folder, QUERIES[0], 10, exclude)
    assert ids(found) == ids(fused([each[:25] for each in lists], 60))[:10]


def test_embeddings_are_used_where_there_are_any(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_index([Document(doc_id=DocId("d"), title="river", text="bridge")], tmp_path, Index())
    assert search(folder, QUERIES[0], 9) == search(folder, QUERIES[0], 9, mode="hybrid")
    assert search(tmp_path, "river", 9) == search(tmp_path, "river", 9, mode="bm25") != []
    for mode in ("dense", "hybrid"):
        with pytest.raises(ConfigError, match=r"index\.dense\.model"):
            search(tmp_path, "river", 9, mode=mode)
    monkeypatch.setattr("harness1.retrieval.retriever.open_embedder", lambda *_: HashEmbedder(32))
    with pytest.raises(CorpusError, match="another embedding model"):
        search(folder, "river", 9)


def test_vectors_that_are_not_finite_are_a_fault_and_not_an_empty_answer(folder: Path) -> None:
    broken: Any = SimpleNamespace(
        get_embedding_dimension=lambda: SIZE, encode_query=lambda *_, **__: np.full(SIZE, np.nan)
    )
    embedder = EncodingEmbedder(broken, "some/model", "", "", "")
    retriever = EmbeddedRetriever(open_index(folder), Retrieval(mode="dense"), embedder)
    (answer,) = asyncio.run(retriever.search([SearchRequest("river", 3)]))
    assert isinstance(answer, RetrievalFault)
    assert "some/model" in answer.message


def test_the_best_are_read_again_the_others_follow_and_what_they_were_before_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness1.retrieval.retriever.RERANKED", 3)
    (result,) = answers(reranking(folder, Scorer()), [SearchRequest(QUERIES[0], 9)])
    names = [hit.chunk.chunk_id for hit in result.hits]
    assert list(result.pre_rerank_ids) == ids(search(folder, QUERIES[0], 9))
    assert set(names[:3]) == set(result.pre_rerank_ids[:3])
    assert names[3:] == list(result.pre_rerank_ids[3:])
    monkeypatch.setattr("harness1.retrieval.retriever.RERANKED", 12)
    scorer = Scorer()
    (result,) = answers(reranking(folder, scorer), [SearchRequest(QUERIES[0], 5)])
    before = search(folder, QUERIES[0], 12)
    chunks = asyncio.run(reranking(folder, scorer).get(ids(before)))
    assert not isinstance(chunks, RetrievalFault)
    chances = {each.chunk_id: scorer.chance(QUERIES[0], f"{each.title}\n{each.text}") for each in chunks}
    assert list(result.pre_rerank_ids) == ids(before)
    assert [hit.chunk.chunk_id for hit in result.hits] == sorted(chances, key=lambda name: -chances[name])[:5]
    assert [1 / (1 + np.exp(-hit.score)) for hit in result.hits] == pytest.approx(sorted(chances.values())[:-6:-1])


@pytest.mark.parametrize("on", [False, True])
def test_a_batch_changes_no_answer(folder: Path, on: bool) -> None:
    plain = open_embedded(folder, Config())
    retriever = reranking(folder, Scorer()) if on else plain
    together = answers(retriever, requests(20))
    alone = [answers(retriever, [request])[0] for request in requests(20)]
    assert [msgspec.structs.replace(each, stage_ms={}) for each in together] == [
        msgspec.structs.replace(each, stage_ms={}) for each in alone
    ]
    for request, result in zip(requests(20), together, strict=True):
        assert len(result.hits) == request.k
        assert not request.exclude & {hit.chunk.chunk_id for hit in result.hits}


def test_concurrent_searches_share_a_batch_whose_time_each_tells(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.retrieval.retriever.WINDOW_S", 10.0)  # bounds a failure: 16 searches are enough
    monkeypatch.setattr("harness1.retrieval.retriever.BATCH_SIZE", 16)
    scorer = Scorer(seconds=0.02)
    retriever = reranking(folder, scorer)

    async def concurrently() -> list[Any]:
        return await asyncio.gather(*(retriever.search([request]) for request in requests(16)))

    begin = time.perf_counter()
    found = asyncio.run(concurrently())
    elapsed = (time.perf_counter() - begin) * 1000
    assert len(scorer.calls) == 1
    stages = found[0][0].stage_ms
    assert list(stages) == ["bm25", "dense", "fuse", "rerank"]
    assert all(each.stage_ms == stages for (each,) in found)
    assert stages["rerank"] >= 20
    assert sum(stages.values()) <= elapsed


ABOUT = "the poet of the castle"


def hits(folder: Path, request: SearchRequest, **settings: Any) -> Sequence[Scored]:
    (found,) = answers(open_embedded(folder, Config(env=Env(retrieval=Retrieval(**settings)))), [request])
    return found.hits


@pytest.mark.parametrize("mode", ["hybrid", "dense"])
def test_a_result_has_the_cosine_of_its_text_with_the_text_that_is_asked_about(folder: Path, mode: str) -> None:
    plain = hits(folder, SearchRequest("rain castle king", 5), mode=mode)
    compared = hits(folder, SearchRequest("rain castle king", 5, about=ABOUT), mode=mode)
    embedder = HashEmbedder(SIZE)
    (about,) = embedder.embed_queries([ABOUT])
    texts = embedder.embed_documents([f"{each.chunk.title}\n{each.chunk.text}" for each in compared])
    assert [each.likeness for each in compared] == pytest.approx((texts @ about).tolist(), abs=2e-3)
    assert [(each.chunk, each.score) for each in plain] == [(each.chunk, each.score) for each in compared]
    by_terms = hits(folder, SearchRequest("castle", 5, about=ABOUT), mode="bm25")
    assert [each.likeness for each in (*plain, *by_terms)] == [None] * 10


DOCUMENTS = [
    Document(doc_id=DocId("b"), title="River", text="The river has a bridge."),
    Document(doc_id=DocId("a"), title="River", text="The river has a bridge."),
    Document(doc_id=DocId("c"), title="Castle", text="The castle is old. It has a deep moat. A river fills it."),
    Document(doc_id=DocId("d"), title="Market", text="Fish and bread."),
]


@pytest.fixture(scope="module")
def retriever(tmp_path_factory) -> Retriever:
    folder = tmp_path_factory.mktemp("index")
    build_index(DOCUMENTS, folder, config.Index(chunk_tokens=8))
    return EmbeddedRetriever(open_index(folder))


def test_a_failing_engine_is_a_fault_of_its_request_alone(retriever, tmp_path, monkeypatch) -> None:
    build_index(DOCUMENTS, tmp_path, config.Index())
    index = open_index(tmp_path)
    real = index.bm25.search

    def failing(query: str, *rest):
        if query == "castle":
            raise OSError("stale file handle")
        return real(query, *rest)

    monkeypatch.setattr(index.bm25, "search", failing)
    requests = [SearchRequest(query="castle", k=1), SearchRequest(query="river", k=1)]
    first, second = asyncio.run(EmbeddedRetriever(index).search(requests))
    assert first == RetrievalFault(message="OSError: stale file handle")
    assert found(second) == ["a"]


def built(folder: Path) -> Path:
    """An index with embeddings."""
    build_index(DOCUMENTS, folder, config.Index(dense=Dense(model="hash:64")))
    return folder


def test_an_open_reader_keeps_its_embeddings_while_newer_generations_come(tmp_path) -> None:
    retriever = open_embedded(built(tmp_path), Config())
    for name in ("e", "f"):
        add_documents([Document(doc_id=DocId(name), title="River", text="One more river.")], tmp_path)
    assert found(look(retriever, "river bridge", 2)) == ["a", "b"]
    assert {"e", "f"} <= set(found(look(open_embedded(tmp_path, Config()), "river", 10)))


def test_an_index_whose_embeddings_are_gone_opens_for_terms_alone(tmp_path) -> None:
    (rows,) = built(tmp_path / "rows").rglob("rows.npy")
    rows.unlink()
    shutil.rmtree(built(tmp_path / "vectors") / "vectors")
    for name in ("rows", "vectors"):
        with pytest.raises(CorpusError, match="build"):
            open_embedded(tmp_path / name, Config())
        retriever = open_embedded(tmp_path / name, load_config(None, ["env.retrieval.mode=bm25"]))
        assert found(look(retriever, "bridge")) == ["a", "b"]


class Stuck(HashEmbedder):
    """Embeds no query before `gate` is set."""

    def __init__(self) -> None:
        super().__init__(64)
        self.gate = threading.Event()

    def embed_queries(self, texts) -> NDArray[np.float32]:
        assert self.gate.wait(10)
        return super().embed_queries(texts)


def test_a_deadline_is_kept_while_a_model_works(tmp_path) -> None:
    embedder = Stuck()
    retriever = EmbeddedRetriever(open_index(built(tmp_path)), Retrieval(), embedder)
    begin = time.monotonic()
    requests = [SearchRequest("river", 1, deadline=0.05), SearchRequest("castle", 1, deadline=0.1)]
    assert asyncio.run(retriever.search(requests)) == [RetrievalFault(message="deadline")] * 2
    assert 0.1 <= time.monotonic() - begin < 2.0
    embedder.gate.set()
    assert found(look(retriever, "castle", 1)) == ["c"]


def test_long_queries_and_long_lists_are_searched_beside_the_event_loop(retriever: EmbeddedRetriever) -> None:
    threads: list[bool] = []
    answer, words = retriever._answer, "river castle market bridge "

    def noted(asked: Sequence[Any]) -> list[Any]:
        threads.append(threading.current_thread() is threading.main_thread())
        return answer(asked)

    retriever._beside._work, retriever._answer = noted, noted
    try:
        short, long = (SearchRequest(words, k=10), SearchRequest(words, k=5000)), SearchRequest(words * 200, k=10)
        found = asyncio.run(retriever.search([*short, long]))
        late = asyncio.run(retriever.search([SearchRequest(words, k=5000, deadline=-1.0)]))
    finally:
        retriever._beside._work, retriever._answer = answer, answer
    assert threads[:3] == [True, False, False]
    assert [hit.chunk for hit in found[0].hits] == [hit.chunk for hit in found[1].hits]
    assert len(found[2].hits) == len(found[0].hits)
    assert late == [RetrievalFault("deadline")]


def test_scores_within_a_ten_thousandth_of_the_top_are_ordered_by_id() -> None:
    scored = [(ChunkId("c"), 10.0), (ChunkId("a"), 9.9999), (ChunkId("b"), 9.99)]
    assert [name for name, _ in total_order(scored)] == ["a", "c", "b"]
    equal = [(ChunkId(name), 1.0) for name in "dbca"]
    assert [name for name, _ in total_order(equal, 2)] == ["a", "b"], "at the cut, too"
    for high in (-1.0, 0.0):
        assert [name for name, _ in total_order([(ChunkId("a"), -2.0), (ChunkId("b"), high)])] == ["b", "a"]
    assert total_order([]) == []


# Few distinct values, some of them a fraction of a level apart, so that ties fall on the cut again and again.
SCORES = st.sampled_from([0.0, 1.0, 1.00002, 1.00007, 1.00012, 1.5, 0.3, 0.1, 0.05, 0.05001, 0.0500001, 2.0])


@given(st.lists(SCORES, max_size=60), st.integers(0, 70), st.randoms(use_true_random=False))
def test_the_vector_form_gives_the_same_order(values, k, random) -> None:
    scores = np.array(values, dtype=np.float32)
    names = [f"{number:03d}" for number in random.sample(range(len(values)), len(values))]
    ranks = np.array([int(name) for name in names], dtype=np.int32)
    expected = total_order(zip(names, scores.tolist(), strict=True), k)
    assert [names[at] for at in best_first(scores, ranks, k)] == [name for name, _ in expected]


def test_fusion_adds_reciprocal_ranks_and_nothing_for_a_missing_id() -> None:
    fused = dict(rrf([["a", "b"], ["b"]], k=60))
    assert fused == {"a": 1 / 61, "b": 1 / 62 + 1 / 61}
    assert [name for name, _ in rrf([["a", "b"], ["b"]])] == ["b", "a"]
    assert dict(rrf([["a", "a", "b"]], k=1)) == {"a": 1 / 2, "b": 1 / 3}, "a repeated one counts once"


def test_fusion_breaks_ties_by_id_whatever_the_order_of_the_lists() -> None:
    rankings = [["b", "z"], ["a", "z"], ["c", "z"]]
    for order in permutations(rankings):
        assert [name for name, _ in rrf(list(order))] == ["z", "a", "b", "c"]
