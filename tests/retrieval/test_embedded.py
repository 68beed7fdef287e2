import asyncio
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harness1 import config
from harness1.config import Config, Dense, Machine, Retrieval, load_config
from harness1.errors import CorpusError
from harness1.records import ChunkId, DocId
from harness1.retrieval.build import add_documents, build_index
from harness1.retrieval.corpus import Document
from harness1.retrieval.embedder import HashEmbedder
from harness1.retrieval.index import open_index
from harness1.retrieval.protocol import BadPattern, RetrievalFault, Retriever, SearchRequest, SearchResult, total_order
from harness1.retrieval.retriever import EmbeddedRetriever, open_embedded

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


def search(retriever: Retriever, query: str, k: int = 10, *exclude: str) -> SearchResult:
    request = SearchRequest(query=query, k=k, exclude=frozenset(ChunkId(name) for name in exclude))
    (result,) = asyncio.run(retriever.search([request]))
    assert isinstance(result, SearchResult)
    return result


def found(result: SearchResult) -> list[str]:
    return [hit.chunk.chunk_id for hit in result.hits]


def test_hits_are_totally_ordered_whole_chunks(retriever) -> None:
    result = search(retriever, "river")
    assert found(result) == ["a", "b", "c#2"]
    assert result.hits[2].chunk.text == "A river fills it."
    assert result.pre_rerank_ids == ()
    assert set(result.stage_ms) == {"bm25"}
    scored = [(hit.chunk.chunk_id, hit.score) for hit in result.hits]
    assert total_order(scored[::-1]) == scored


def test_excluded_chunks_never_come_back(retriever) -> None:
    assert found(search(retriever, "river", 1)) == ["a"]
    assert found(search(retriever, "river", 1, "a")) == ["b"]
    assert found(search(retriever, "river", 10, "a", "b", "c#2", "unknown")) == []


def test_the_same_chunk_is_the_same_object(retriever) -> None:
    (chunk,) = asyncio.run(retriever.read(DocId("a")))
    assert search(retriever, "river").hits[0].chunk is chunk


def test_requests_are_answered_in_order_and_a_late_one_alone_fails(retriever) -> None:
    requests = [SearchRequest(query="castle", k=3), SearchRequest(query="river", k=3, deadline=-1.0)]
    answers = asyncio.run(retriever.search([*requests, SearchRequest(query="unknownword", k=3)]))
    assert [type(answer) for answer in answers] == [SearchResult, RetrievalFault, SearchResult]
    assert answers[1] == RetrievalFault(message="deadline")
    assert answers[2].hits == ()


def test_a_document_is_read_whole_and_chunks_are_got_in_the_order_asked(retriever) -> None:
    assert [chunk.chunk_id for chunk in asyncio.run(retriever.read(DocId("c")))] == ["c#0", "c#1", "c#2"]
    assert asyncio.run(retriever.read(DocId("c#0"))) == ()
    got = asyncio.run(retriever.get([ChunkId("d"), ChunkId("no"), ChunkId("c#1"), ChunkId("\ud800")]))
    assert [chunk.chunk_id for chunk in got] == ["d", "c#1"]


def test_grep_sees_titles_and_texts_in_corpus_order(retriever) -> None:
    def grep(pattern: str, limit: int = 5, deadline: float = 5.0):
        answer = asyncio.run(retriever.grep(pattern, limit, deadline))
        return [chunk.chunk_id for chunk in answer] if isinstance(answer, tuple) else answer

    assert grep("(?i)river") == ["b", "a", "c#2"]
    assert grep("(?i)river", 2) == ["b", "a"]
    assert grep(r"^Castle\nIt") == ["c#1"]
    assert grep("absent") == []
    assert isinstance(grep("("), BadPattern)
    assert grep("river", 5, -1.0) == RetrievalFault(message="deadline")


def test_grep_looks_beyond_its_first_stretch(tmp_path) -> None:
    documents = [Document(doc_id=DocId(f"{n:03d}"), title="t", text="even" if n % 2 else "odd") for n in range(300)]
    build_index(documents, tmp_path, config.Index())
    answer = asyncio.run(EmbeddedRetriever(open_index(tmp_path)).grep("even", 140, 5.0))
    assert [chunk.chunk_id for chunk in answer] == [f"{n:03d}" for n in range(1, 280, 2)]


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
    assert found(search(retriever, "river bridge", 2)) == ["a", "b"]
    assert {"e", "f"} <= set(found(search(open_embedded(tmp_path, Config()), "river", 10)))


def test_an_index_whose_embeddings_are_gone_opens_for_terms_alone(tmp_path) -> None:
    (rows,) = built(tmp_path / "rows").rglob("rows.npy")
    rows.unlink()
    shutil.rmtree(built(tmp_path / "vectors") / "vectors")
    for name in ("rows", "vectors"):
        with pytest.raises(CorpusError, match="build"):
            open_embedded(tmp_path / name, Config())
        retriever = open_embedded(tmp_path / name, load_config(None, ["env.retrieval.mode=bm25"]))
        assert found(search(retriever, "bridge")) == ["a", "b"]


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
    retriever = EmbeddedRetriever(open_index(built(tmp_path)), Retrieval(), Machine(), embedder)
    begin = time.monotonic()
    requests = [SearchRequest("river", 1, deadline=0.05), SearchRequest("castle", 1, deadline=0.1)]
    assert asyncio.run(retriever.search(requests)) == [RetrievalFault(message="deadline")] * 2
    assert 0.1 <= time.monotonic() - begin < 2.0
    embedder.gate.set()
    assert found(search(retriever, "castle", 1)) == ["c"]


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
