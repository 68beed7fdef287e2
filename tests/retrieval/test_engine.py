from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from harness1 import config
from harness1.config import Machine
from harness1.errors import CorpusError, InfrastructureFault, SchemaError, UsageError
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.corpus import Document
from harness1.retrieval.engines.engine import (
    FIRST_STRETCH,
    FORMAT,
    Address,
    ChunkStream,
    EngineIndex,
    EngineRetriever,
    Hits,
    is_unicode,
    parse_address,
    reporting,
)
from harness1.retrieval.protocol import IndexInfo, RetrievalFault, SearchRequest, SearchResult
from tests.retrieval.test_contract import ids


class ListEngine:
    """An engine over a list: a query finds all chunks, those with its length as number best. `delay_s` slows it."""

    name = "list"
    errors = (ConnectionError,)

    def __init__(self, size: int = 20) -> None:
        self.held = [Chunk(ChunkId(f"c{n:04d}"), DocId("d"), n, "t", f"text {n}") for n in range(size)]
        self.info = IndexInfo("hash", "document", 1, size)
        self.asked: list[tuple[object, ...]] = []
        self.at_once, self.most_at_once = 0, 0
        self.delay_s = 0.0
        self.failure: Exception | None = None
        self.lock = threading.Lock()

    def search(self, query: str, k: int, exclude: Sequence[str], timeout: float) -> Hits:
        self._work("search", query, k)
        assert all(map(is_unicode, exclude))
        if query == "unembeddable":
            raise RuntimeError("out of memory")
        left = [chunk for chunk in self.held if chunk.chunk_id not in exclude]
        return [(chunk, float(chunk.index < len(query))) for chunk in left[::-1]]

    def stretch(self, start: int, stop: int, literal: str, timeout: float) -> list[Chunk]:
        self._work("stretch", start, stop, literal)
        return [chunk for chunk in self.held[start:stop] if literal in chunk.text or literal in chunk.title]

    def document(self, doc_id: str, timeout: float) -> list[Chunk]:
        self._work("document")
        return self.held[::-1]

    def chunks(self, chunk_ids: Sequence[str], timeout: float) -> list[Chunk]:
        self._work("chunks")
        return [chunk for chunk in self.held if chunk.chunk_id in chunk_ids]

    def _work(self, *what: object) -> None:
        with self.lock:
            self.asked.append(what)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.delay_s)
        with self.lock:
            self.at_once -= 1
        if self.failure:
            raise self.failure


def test_half_a_surrogate_pair_never_reaches_the_engine() -> None:
    engine, odd = ListEngine(), ChunkId("\ud800")
    retriever = EngineRetriever(engine, Machine())
    (answer,) = asyncio.run(retriever.search([SearchRequest("a\ud800", 1, frozenset({odd}))]))
    assert ids(answer) == ["c0000"]
    assert asyncio.run(retriever.read(DocId("\ud800"))) == asyncio.run(retriever.get([odd])) == ()
    assert [asked[:2] for asked in engine.asked] == [("search", "a?")]


def test_no_more_calls_are_in_flight_than_threads_and_none_is_lost() -> None:
    engine = ListEngine()
    engine.delay_s = 0.01
    retriever = EngineRetriever(engine, Machine(concurrency=3))

    async def many() -> list[list[SearchResult | RetrievalFault]]:
        return await asyncio.gather(*(retriever.search([SearchRequest("a", 1)]) for _ in range(20)))

    for _ in range(2):  # once in each of two event loops
        assert [ids(answer) for (answer,) in asyncio.run(many())] == [["c0000"]] * 20
    assert engine.most_at_once == 3


def test_a_slow_engine_is_a_fault_in_time_and_waiting_for_a_thread_counts() -> None:
    engine = ListEngine()
    engine.delay_s = 0.3
    retriever = EngineRetriever(engine, Machine(concurrency=1))
    begin = time.monotonic()

    async def two() -> list[list[SearchResult | RetrievalFault]]:
        return await asyncio.gather(*(retriever.search([SearchRequest("a", 1, deadline=0.05)]) for _ in range(2)))

    assert asyncio.run(two()) == [[RetrievalFault("deadline")]] * 2
    assert time.monotonic() - begin < 0.25
    time.sleep(0.35)
    assert len(engine.asked) == 1
    assert asyncio.run(EngineRetriever(engine, Machine()).grep("text", 5, 0.1)) == RetrievalFault("deadline")
    time.sleep(0.35)


def test_errors_of_the_engine_are_faults_and_mistakes_in_the_code_are_not() -> None:
    engine = ListEngine()
    retriever = EngineRetriever(engine, Machine())
    engine.failure = ConnectionError("gone")
    expected = RetrievalFault("list: ConnectionError: gone")
    assert asyncio.run(retriever.search([SearchRequest("a", 1)] * 2)) == [expected] * 2
    assert asyncio.run(retriever.grep("a", 1, 1.0)) == expected
    assert asyncio.run(retriever.read(DocId("d"))) == expected
    assert asyncio.run(retriever.get([ChunkId("c0001")])) == expected
    engine.failure = KeyError("bug")
    with pytest.raises(KeyError):
        asyncio.run(retriever.read(DocId("d")))


def test_ids_decide_among_equals_and_a_query_that_the_model_fails_on_leaves_the_others() -> None:
    engine = ListEngine()
    requests = [SearchRequest("a", 3), SearchRequest("unembeddable", 1), SearchRequest("ab", 2)]
    answers = asyncio.run(EngineRetriever(engine, Machine()).search(requests))
    assert answers[1] == RetrievalFault("list: RuntimeError: out of memory")
    assert [ids(answers[0]), ids(answers[2])] == [["c0000", "c0001", "c0002"], ["c0000", "c0001"]]


def test_grep_asks_for_longer_and_longer_stretches_and_stops_at_its_limit() -> None:
    engine = ListEngine(4 * FIRST_STRETCH)
    retriever = EngineRetriever(engine, Machine())
    found = asyncio.run(retriever.grep("text .*00$", 3, 5.0))
    assert isinstance(found, tuple)
    assert [chunk.index for chunk in found] == [100, 200, 300]
    first, second = ("stretch", 0, FIRST_STRETCH, "text "), ("stretch", FIRST_STRETCH, 3 * FIRST_STRETCH, "text ")
    assert engine.asked == [first, second]
    assert len(asyncio.run(retriever.grep("text", 10_000, 5.0))) == 4 * FIRST_STRETCH
    assert asyncio.run(retriever.grep("text", 0, 5.0)) == ()


SETTINGS = config.Index(chunk_tokens=4)


def document(name: str, text: str = "One. Two three four five. Six.") -> Document:
    return Document(DocId(name), "Title", text)


def passed(documents: list[Document], settings: config.Index = SETTINGS) -> ChunkStream:
    stream = ChunkStream(documents, settings)
    for _ in stream.batches(2):
        pass
    return stream


def test_chunks_come_in_corpus_order_in_batches_and_are_counted() -> None:
    stream = ChunkStream([document("a"), document("b", "Short.")], SETTINGS)
    batches = list(stream.batches(2))
    placed = [item for batch in batches for item in batch]
    assert [len(batch) for batch in batches[:-1]] == [2] * (len(batches) - 1)
    assert [position for position, _ in placed] == list(range(len(placed)))
    assert placed[0][1].chunk_id == "a#0"
    assert placed[-1][1].chunk_id == "b"
    info = stream.finish("engine", "").info
    assert (info.documents, info.chunks) == (2, len(placed))


def test_the_hash_names_documents_settings_engine_and_embedder_in_any_order() -> None:
    documents = [document("a"), document("b")]
    base = passed(documents).finish("engine", "").info.index_hash
    assert passed(documents[::-1]).finish("engine", "").info.index_hash == base
    others = [
        passed(documents[:1]).finish("engine", ""),
        passed(documents, config.Index(chunk_tokens=5)).finish("engine", ""),
        passed(documents).finish("other", ""),
        passed(documents).finish("engine", "model"),
    ]
    assert len({base, *(other.info.index_hash for other in others)}) == 5
    moved = [config.Index(chunk_tokens=4, dense=config.Dense(model=path)) for path in ("/here/minilm", "/there/minilm")]
    assert {passed(documents, each).finish("engine", "model").info for each in moved} == {others[-1].info}


def test_a_corpus_must_have_documents_with_ids_of_their_own() -> None:
    with pytest.raises(CorpusError, match="no documents"):
        passed([]).finish("engine", "")
    with pytest.raises(CorpusError, match="'a'"):
        passed([document("a"), document("a")])
    with pytest.raises(CorpusError, match="'a#0'"):
        passed([document("a"), document("a#0", "Short.")])


def test_an_index_of_another_format_is_refused() -> None:
    whole = EngineIndex(FORMAT, IndexInfo("hash", "document", 1, 1), SETTINGS)
    assert EngineIndex.read(msgspec.json.encode(whole).decode(), "x") == whole
    removed = msgspec.to_builtins(whole)
    removed["settings"]["dense"]["search"] = "ivf"
    for other, kind, told in (
        (replace(whole, format=FORMAT + 1), SchemaError, "upgrade"),
        (replace(whole, format=FORMAT - 1), CorpusError, "build it again"),
        (removed, CorpusError, r"x must be built again.*search=ivf was removed"),
    ):
        with pytest.raises(kind, match=told):
            EngineIndex.read(msgspec.json.encode(other).decode(), "x")
    with pytest.raises(CorpusError, match="2 chunks instead of 1"):
        whole.check_count("x", 2)


def test_wrong_addresses_are_told_apart() -> None:
    wrong = {
        "chroma": ["http://user:secret@host", "http://host/path", "http://host#a", "http://host# b c"],
        "milvus": ["a.db#bad name", "a.db#9"],
    }
    for engine, specs in wrong.items():
        for spec in ("folder", "ftp://user:secret@host", *specs):
            with pytest.raises(UsageError) as error:
                parse_address(engine, spec)
            assert "secret" not in str(error.value)


def test_a_failure_of_an_engine_is_told_without_the_password_of_its_address() -> None:
    where = Address("milvus", "http://user:secret@host:1", "x")
    told = pytest.raises(InfrastructureFault, match=r"milvus:http://.*#x: ConnectionError: ")
    with told as error, reporting(where, (ConnectionError,)):
        raise ConnectionError(f"no answer from {where.uri}")
    assert "secret" not in str(error.value)
