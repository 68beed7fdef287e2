"""The retrieval service without sockets: what each route answers and refuses, and how its work is bounded."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult
from harness1.retrieval.sharing import CachingRetriever
from harness1.serve import retrieve
from harness1.serve.retrieve import RetrievalService
from harness1.serve.service import ServiceLimits
from tests.serving import Reply, asking
from tests.support import CORPUS, WordRetriever, chunk, run

SMALL = ServiceLimits(body_bytes=2000, queries=3, hits=40, running=2, waiting=2, wait_s=5.0, deadline_s=5.0)


class Held(WordRetriever):
    """Keeps searches for more than some hits until `gate` is set, and counts how many are there at once."""

    def __init__(self, above: int = 0) -> None:
        super().__init__(CORPUS)
        self.gate, self.above = asyncio.Event(), above
        self.inside = self.most = 0
        self.asked: list[SearchRequest] = []

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        self.asked += requests
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await (self.gate.wait() if requests[0].k > self.above else asyncio.sleep(0))
        finally:
            self.inside -= 1
        return await super().search(requests)


def body(value: Any) -> bytes:
    return value if isinstance(value, bytes) else msgspec.json.encode(value)


def ask(service: RetrievalService, path: str, value: Any = None, method: str = "POST") -> tuple[int, Any]:
    reply = run(asking(service.app, method, path, body(value)))
    assert reply.kind == "application/json"
    return reply.status, json.loads(reply.body)


def begin(served: RetrievalService, query: str = "ada") -> asyncio.Task[Reply]:
    call = body({"requests": [{"query": query, "k": 1}]})
    return asyncio.create_task(asking(served.app, "POST", "/search", call))


def service(retriever: WordRetriever | None = None, limits: ServiceLimits = SMALL, config: Config | None = None):
    return RetrievalService(retriever or WordRetriever(CORPUS), config or Config(), limits)


def test_search_r1_gets_what_its_own_server_gives_and_never_an_empty_list_for_a_fault() -> None:
    first = {"id": "ada#0", "contents": f"Ada Lovelace\n{CORPUS[0].text}"}
    queries = {"queries": ["lovelace daughter", "unheard"], "topk": 1, "return_scores": True}
    assert ask(service(), "/retrieve", queries) == (200, {"result": [[{"document": first, "score": 2.0}], []]})
    assert ask(service(), "/retrieve", {"queries": ["lovelace daughter"], "topk": 1}) == (200, {"result": [[first]]})
    assert ask(service(), "/retrieve", {"queries": []}) == (200, {"result": []})
    for extra in ({}, {"topk": None}, {"topk": 0}):
        status, found = ask(service(), "/retrieve", {"queries": ["the town poet ada"], **extra})
        assert (status, len(found["result"][0])) == (200, 3)
    titled = WordRetriever([chunk("a", "word one"), chunk("b", "word two", "First\nSecond")])
    _, found = ask(service(titled), "/retrieve", {"queries": ["word"]})
    assert [passage["contents"] for passage in found["result"][0]] == ["\nword one", "First Second\nword two"]
    faulty = service(WordRetriever(CORPUS, faults=1))
    assert ask(faulty, "/retrieve", {"queries": ["ada", "byron"]}) == (503, {"error": "down"})


def test_the_native_route_answers_each_query_by_a_result_or_a_fault() -> None:
    requests = [{"query": "poet", "k": 2}, {"query": "ada", "k": 5, "exclude": ["ada#0"]}, {"query": "unheard", "k": 1}]
    status, found = ask(service(WordRetriever(CORPUS, faults=1)), "/search", {"requests": requests})
    assert status == 200
    faulty, one, none = found["answers"]
    assert faulty == {"fault": "down"}
    assert [hit["chunk"]["chunk_id"] for hit in one["result"]["hits"]] == ["babbage#0"]
    assert one["result"]["hits"][0]["chunk"] == msgspec.to_builtins(CORPUS[2])
    assert none == {"result": {}}


def test_grep_read_and_get_answer_chunks_or_a_bad_pattern_or_a_fault() -> None:
    served = service()
    status, found = ask(served, "/grep", {"pattern": "Missolonghi", "limit": 1})
    assert (status, [made["chunk_id"] for made in found["chunks"]]) == (200, ["byron#0"])
    assert set(ask(served, "/grep", {"pattern": "(", "limit": 1})[1]) == {"bad_pattern"}
    assert ask(served, "/grep", {"pattern": "absent", "limit": 1}) == (200, {"chunks": []})
    assert ask(service(WordRetriever(CORPUS, faults=1)), "/grep", {"pattern": "a", "limit": 1})[1] == {"fault": "down"}
    assert ask(service(), "/read", {"doc_id": "ada"}) == (200, {"chunks": [msgspec.to_builtins(CORPUS[0])]})
    assert ask(service(), "/read", {"doc_id": "nobody"}) == (200, {"chunks": []})
    assert ask(service(), "/get", {"chunk_ids": ["miss#0"]})[1]["chunks"][0]["chunk_id"] == "miss#0"


def test_info_tells_the_index_and_the_ranking_settings() -> None:
    served = service(config=load_config(None, ["env.retrieval.mode=bm25"]))
    status, found = ask(served, "/info", method="GET")
    assert (status, found["index"]["index_hash"], found["retrieval"]["mode"]) == (200, "word-index", "bm25")
    assert ask(served, "/health", method="GET") == (200, {"status": "ok"})


def test_a_client_that_counts_on_another_index_or_ranking_is_refused() -> None:
    request = {"requests": [{"query": "ada", "k": 1}]}
    ranking = msgspec.to_builtins(Config().env.retrieval)
    assert ask(service(), "/search", {**request, "retrieval": ranking, "index_hash": "word-index"})[0] == 200
    status, found = ask(service(), "/search", {**request, "retrieval": {**ranking, "mode": "dense"}})
    assert status == 409
    assert "env.retrieval" in found["error"]
    others = (("/grep", {"pattern": "a", "limit": 1}), ("/read", {"doc_id": "a"}), ("/get", {"chunk_ids": []}))
    for path, call in (("/search", request), *others):
        assert ask(service(), path, {**call, "index_hash": "other"})[0] == 409


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        *(("/retrieve", b"{", "truncated"), ("/retrieve", b"\xff\xfe", "malformed")),
        *(("/retrieve", b"[" * 1500, "RetrieveCall"), ("/retrieve", [], "object"), ("/retrieve", {}, "queries")),
        *(("/retrieve", {"queries": "ada"}, "array"), ("/retrieve", {"queries": [None]}, "str")),
        ("/retrieve", {"queries": ["a"], "topk": -1}, ">= 0"),
        ("/retrieve", {"queries": ["a"], "topk": "3"}, "int"),
        ("/retrieve", {"queries": ["a"], "top_k": 3}, "top_k"),
        ("/retrieve", {"queries": ["a"] * 4}, "at most 3"),
        ("/retrieve", {"queries": ["a", "b"], "topk": 21}, "at most 40"),
        ("/search", {"requests": []}, "length >= 1"),
        ("/search", {"requests": [{"query": "a", "k": -1}]}, ">= 0"),
        ("/search", {"requests": [{"query": "a"}]}, "k"),
        ("/search", {"requests": [{"query": "a", "k": 1, "filter": 1}]}, "filter"),
        ("/search", {"requests": [{"query": "a", "k": 1}] * 4}, "at most 3"),
        ("/search", {"requests": [{"query": "a", "k": 41}]}, "at most 40"),
        ("/search", {"requests": [{"query": "a", "k": 1, "exclude": "a"}]}, "array"),
        ("/grep", {"pattern": "a", "limit": -1}, ">= 0"),
        ("/grep", {"pattern": "a", "limit": 41}, "at most 40"),
        ("/read", {"doc_id": 3}, "str"),
        ("/get", {"chunk_ids": ["a"] * 41}, "at most 40"),
    ],
)
def test_what_is_no_proper_call_is_400_with_a_reason(path: str, value: Any, says: str) -> None:
    status, found = ask(service(), path, value)
    assert status == 400
    assert set(found) == {"error"}
    assert says in found["error"]


def test_calls_beyond_the_running_wait_and_those_beyond_the_waiting_are_told_to_come_again() -> None:
    async def scene() -> tuple[list[int], int]:
        retriever = Held()
        served = RetrievalService(retriever, Config(), SMALL)
        calls = [begin(served) for _ in range(6)]
        await asyncio.sleep(0.05)
        assert [task.done() for task in calls] == [False] * 4 + [True] * 2
        assert calls[5].result().headers == {"retry-after": "1"}
        assert (await asking(served.app, "GET", "/health", body(None))).status == 200
        retriever.gate.set()
        statuses = [(await task).status for task in calls]
        assert (await begin(served)).status == 200
        return statuses, retriever.most

    assert run(scene()) == ([200] * 4 + [503] * 2, 2)


def test_a_place_in_line_is_given_back_by_a_client_that_leaves_and_by_one_that_waited_too_long() -> None:
    async def scene() -> list[int]:
        retriever = Held()
        served = RetrievalService(retriever, Config(), msgspec.structs.replace(SMALL, running=1, waiting=1, wait_s=0.1))
        running = begin(served)
        await asyncio.sleep(0)
        left = begin(served)
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        tired = await begin(served)
        assert b"no turn came" in tired.body
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        calls = [begin(served) for _ in range(3)]
        await asyncio.sleep(0.01)
        retriever.gate.set()
        after = await asyncio.gather(*calls)
        return [tired.status, *(reply.status for reply in after)]

    assert run(scene()) == [503, 200, 200, 503]


@pytest.mark.parametrize("cached", [False, True])
def test_clients_that_leave_take_their_searches_with_them_also_behind_a_cache(cached: bool) -> None:
    async def scene() -> tuple[int, int]:
        retriever = Held()
        served = RetrievalService(CachingRetriever(retriever, 10, "") if cached else retriever, Config(), SMALL)
        for number in range(20):
            client = begin(served, f"ada {number}")
            await asyncio.sleep(0.001)
            client.cancel()
            await asyncio.gather(client, return_exceptions=True)
        await asyncio.sleep(0.001)
        return retriever.most, retriever.inside

    most, left = run(scene())
    assert 1 <= most <= SMALL.running
    assert left == 0


def test_waiting_counts_towards_a_deadline_and_a_late_one_is_cut() -> None:
    retriever = Held(above=9)
    requests = [{"query": "ada", "k": 1, "deadline": 1e9}, {"query": "ada", "k": 1, "deadline": 2.0}]
    served = service(retriever)

    async def slow() -> bytes:
        await asyncio.sleep(0.2)
        return msgspec.json.encode({"requests": requests})

    run(asking(served.app, "POST", "/search", slow))
    cut, near = (request.deadline for request in retriever.asked)
    assert 4.0 < cut < 4.9
    assert 1.0 < near < 1.9


def test_an_engine_that_ignores_its_deadline_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieve, "GRACE_S", 0.1)

    async def scene() -> tuple[bytes, float]:
        served = RetrievalService(Held(), Config(), SMALL)
        begin = time.monotonic()
        asked = body({"requests": [{"query": "a", "k": 1, "deadline": -9.0}] * 2})
        reply = await asking(served.app, "POST", "/search", asked)
        return reply.body, time.monotonic() - begin

    answered, spent = run(scene())
    assert json.loads(answered) == {"answers": [{"fault": "deadline"}] * 2}
    assert 0.1 <= spent < 2.0
