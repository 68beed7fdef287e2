import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from harness1.config import Machine
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.engines.engine import FIRST_STRETCH, EngineRetriever, ScoredChunks
from harness1.retrieval.protocol import IndexInfo, RetrievalFault, SearchRequest, SearchResult


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

    def search(self, queries: Sequence[str], k: int, exclude: Sequence[str], timeout: float) -> list[ScoredChunks]:
        self._work("search", tuple(queries), k)
        if "unembeddable" in queries:
            raise RuntimeError("out of memory")
        left = [chunk for chunk in self.held if chunk.chunk_id not in exclude]
        return [[(chunk, float(chunk.index < len(query))) for chunk in left[::-1]] for query in queries]

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


def ids(answer: object) -> list[str]:
    assert isinstance(answer, SearchResult), answer
    return [hit.chunk.chunk_id for hit in answer.hits]


def test_queries_that_differ_in_nothing_else_are_one_call() -> None:
    engine = ListEngine()
    requests = [SearchRequest("ab", 3), SearchRequest("abc", 2), SearchRequest("a", 3)]
    answers = asyncio.run(EngineRetriever(engine, Machine()).search(requests))
    assert sorted(asked[1] for asked in engine.asked) == [("ab", "a"), ("abc",)]
    assert [ids(answer) for answer in answers] == [
        ["c0000", "c0001", "c0002"],
        ["c0000", "c0001"],
        ["c0000", "c0001", "c0002"],
    ]


def test_ids_decide_among_equals_although_the_engine_has_another_order() -> None:
    (answer,) = asyncio.run(EngineRetriever(ListEngine(), Machine()).search([SearchRequest("", 2)]))
    assert ids(answer) == ["c0000", "c0001"]


def test_half_a_surrogate_pair_never_reaches_the_engine() -> None:
    engine = ListEngine()
    retriever = EngineRetriever(engine, Machine())
    odd = ChunkId("\ud800")
    asyncio.run(retriever.search([SearchRequest("a\ud800", 1, frozenset({odd}))]))
    assert engine.asked[0][1] == ("a?",)
    assert asyncio.run(retriever.read(DocId("\ud800"))) == ()
    assert asyncio.run(retriever.get([odd])) == ()
    assert len(engine.asked) == 1


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


def test_a_query_that_the_model_fails_on_is_a_fault_and_leaves_the_others() -> None:
    engine = ListEngine()
    requests = [SearchRequest("a", 1), SearchRequest("unembeddable", 1), SearchRequest("ab", 2)]
    answers = asyncio.run(EngineRetriever(engine, Machine()).search(requests))
    assert answers[1] == RetrievalFault("list: RuntimeError: out of memory")
    assert [ids(answers[0]), ids(answers[2])] == [["c0000"], ["c0000", "c0001"]]


def test_queries_asked_again_one_by_one_keep_their_deadline() -> None:
    engine = ListEngine()
    engine.delay_s = 0.2
    requests = [SearchRequest("a", 1, deadline=0.3), SearchRequest("unembeddable", 1, deadline=0.3)]
    assert asyncio.run(EngineRetriever(engine, Machine()).search(requests)) == [RetrievalFault("deadline")] * 2


def test_grep_asks_for_longer_and_longer_stretches_and_stops_at_its_limit() -> None:
    engine = ListEngine(4 * FIRST_STRETCH)
    retriever = EngineRetriever(engine, Machine())
    found = asyncio.run(retriever.grep("text .*00$", 3, 5.0))
    assert isinstance(found, tuple)
    assert [chunk.index for chunk in found] == [100, 200, 300]
    assert engine.asked == [
        ("stretch", 0, FIRST_STRETCH, "text "),
        ("stretch", FIRST_STRETCH, 3 * FIRST_STRETCH, "text "),
    ]
    assert len(asyncio.run(retriever.grep("text", 10_000, 5.0))) == 4 * FIRST_STRETCH
    assert asyncio.run(retriever.grep("text", 0, 5.0)) == ()
