"""The client of our own route: what it finds is what the served retriever finds, and what fails is a fault."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.errors import ConfigError, InfrastructureFault
from harness1.plain import text_digest
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.engines import remote as remote_module
from harness1.retrieval.engines.remote import About, RemoteRetriever, SearchR1Retriever
from harness1.retrieval.open import _open, split_engine
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, SearchRequest, SearchResult
from tests.retrieval.test_contract import ids
from tests.serving import HOST, imitating, serving
from tests.support import CORPUS, WordRetriever, run

OPTIONS = ["machine.attempts=2", "machine.call_deadline_s=5.0"]
QUICK = load_config(None, OPTIONS)
NO_GREP = load_config(None, [*OPTIONS, "env.grep.on=false"])
FOUND = b'{"result":[[{"document":{"id":"7","contents":"Title\\nText"},"score":1.0}]]}'


def about(config: Config = QUICK) -> About:
    return About(IndexInfo("word-index", "document", 5, 5), msgspec.to_builtins(config.env.retrieval))


def opened(spec: str, config: Config = QUICK) -> Any:
    """The client alone, without the cache in front of it."""
    return _open(*split_engine(spec), config)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as held:
        return int(held.getsockname()[1])


def one(retriever: RemoteRetriever, query: str, deadline: float = 5.0) -> SearchResult | RetrievalFault:
    (found,) = run(retriever.search([SearchRequest(query, 3, deadline=deadline)]))
    return found


def complaint(retriever: RemoteRetriever, deadline: float = 5.0) -> str:
    fault = one(retriever, "ada", deadline)
    assert isinstance(fault, RetrievalFault)
    return fault.message


def are_faults(remote: RemoteRetriever) -> bool:
    calls = remote.grep("a", 1, 5.0), remote.read(DocId("ada")), remote.get([ChunkId("ada#0")])
    return all(isinstance(run(call), RetrievalFault) for call in calls)


def test_what_is_found_over_the_wire_is_what_the_served_retriever_finds() -> None:
    direct = WordRetriever(CORPUS)
    odd = frozenset({ChunkId("ada#0"), ChunkId("\ud800")})
    plain = ("the poet ada", 2), ("\ud800 poet", 1), ("unheard", 3), ("poet", 0), (" ", 3)
    requests = [SearchRequest("the poet ada", 10, odd), *(SearchRequest(query, k) for query, k in plain)]
    with serving(direct) as url:
        remote = opened(url)
        assert isinstance(remote, RemoteRetriever)
        assert remote.info == direct.info
        assert run(remote.search(requests)) == run(direct.search(requests))
        assert run(remote.search([])) == []
        assert run(remote.search([SearchRequest("poet", -1)])) == [SearchResult()]
        assert run(remote.grep("Missolonghi", 1, 5.0)) == run(direct.grep("Missolonghi", 1, 5.0))
        assert run(remote.grep("absent", 1, 5.0)) == ()
        assert run(remote.grep("(", 1, 5.0)) == run(direct.grep("(", 1, 5.0))
        assert isinstance(run(remote.grep("\ud800", 1, 5.0)), BadPattern)
        for name in ("ada", "nobody", "\ud800"):
            assert run(remote.read(DocId(name))) == run(direct.read(DocId(name)))
        ids = [ChunkId("miss#0"), ChunkId("\ud800"), ChunkId("none")]
        assert run(remote.get(ids)) == run(direct.get(ids)) != ()


def test_a_server_that_goes_is_a_fault_and_one_that_comes_back_answers_again_if_it_is_the_same() -> None:
    with serving(WordRetriever(CORPUS)) as url:
        remote = opened(url)
        assert isinstance(one(remote, "ada"), SearchResult)
    port = int(url.rsplit(":", 1)[1])
    assert url in complaint(remote)
    with serving(WordRetriever(CORPUS), port=port):
        assert isinstance(one(remote, "ada"), SearchResult)
    with serving(WordRetriever(CORPUS), load_config(None, ["env.retrieval.mode=bm25"]), port=port):
        assert "409" in complaint(remote)
    other = WordRetriever(CORPUS)
    other.info = IndexInfo("other", "document", 5, 5)
    with serving(other, port=port):
        assert are_faults(remote)


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (200, b"<html>", "malformed"),
        (200, b"{}", "answers"),
        (200, b'{"answers":[]}', "0 answers"),
        (200, b'{"answers":[{}]}', "neither"),
        (200, b'{"answers":[{"result":{"hits":[{"chunk":1}]}}]}', "hits[0].chunk"),
        (500, b"Internal Server Error", "500 Internal"),
        (503, b'{"error":"too many calls"}', "503 too many calls"),
    ],
)
def test_an_answer_that_is_none_is_a_fault_and_never_no_result(status: int, answer: bytes, says: str) -> None:
    with imitating(lambda *_: (status, answer)) as url:
        remote = RemoteRetriever(url, about(), QUICK.machine)
        assert says in complaint(remote)
        assert are_faults(remote)


def test_a_server_that_does_not_answer_is_a_fault_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.retrieval.engines.remote.GRACE_S", 0.2)
    with socket.create_server((HOST, 0)) as silent:
        remote = RemoteRetriever(f"http://{HOST}:{silent.getsockname()[1]}", about(), QUICK.machine)
        begin = time.monotonic()
        assert "no answer within 0.2 s" in complaint(remote, -1.0)
        assert time.monotonic() - begin < 2.0


def test_opening_where_nobody_answers_is_a_fault_of_the_infrastructure_with_a_clear_text() -> None:
    with pytest.raises(InfrastructureFault, match=r"no retriever answers at .*refused.*2 attempts"):
        opened(f"http://{HOST}:{free_port()}")
    with (
        imitating(lambda *_: (502, b'{"error":"bad gateway"}')) as url,
        pytest.raises(InfrastructureFault, match="502 bad gateway"),
    ):
        opened(url)
    with imitating(lambda *_: (200, b'{"a":1}')) as url, pytest.raises(InfrastructureFault, match="does not describe"):
        opened(url)
    for odd in (f"http://{HOST}:notaport", "http:", "http://a b/"):
        with pytest.raises((ConfigError, InfrastructureFault)):
            opened(odd)


def test_an_address_with_a_password_is_refused_and_the_password_not_repeated() -> None:
    for spec in (f"http://user:my@secret@{HOST}:1", f"https://:secret@{HOST}", f"http:user:secret@{HOST}"):
        with pytest.raises(ConfigError, match=HOST) as caught:
            opened(spec)
        assert "secret" not in str(caught.value)


def test_opening_is_tried_again_while_a_server_starts() -> None:
    asked: list[str] = []

    def starting(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(path)
        return (503, b"starting") if len(asked) == 1 else (200, msgspec.json.encode(about()))

    with imitating(starting) as url:
        assert opened(url).info.index_hash == "word-index"
    assert asked == ["/info", "/info"]


def test_other_ranking_settings_are_an_error_that_says_what_to_set() -> None:
    theirs = load_config(None, ["env.retrieval.mode=bm25", "env.retrieval.rerank.on=true"])
    with serving(WordRetriever(CORPUS), theirs) as url:
        with pytest.raises(ConfigError) as caught:
            opened(url)
        options = str(caught.value).partition("use them: ")[2].replace("--set ", "").split()
        assert options == ["env.retrieval.mode=bm25", "env.retrieval.rerank.on=true"]
        assert isinstance(opened(url, load_config(None, [*OPTIONS, *options])), RemoteRetriever)


def test_versions_that_have_removed_settings_understand_each_other_where_these_had_their_defaults() -> None:
    calls: list[Any] = []

    def earlier(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """A server of a version that had `rrf_k`, and wants to read its own settings again."""
        if method == "GET":
            told = {"index": {"index_hash": "i", "unit": "document", "documents": 1, "chunks": 1}, "retrieval": ranking}
            return 200, json.dumps(told).encode()
        calls.append(json.loads(body)["retrieval"])
        return 200, b'{"answers":[{"result":{}}]}'

    ranking = {"mode": "auto", "rrf_k": 60, "rerank": {"on": False, "candidates": 50}}
    with imitating(earlier) as url:
        assert one(opened(url), "ada") == SearchResult()
        assert calls == [ranking]
        ranking["rrf_k"] = 5
        with pytest.raises(ConfigError, match=rf"{url} ranks with settings .*rrf_k was removed"):
            opened(url)
    with serving(WordRetriever(CORPUS)) as url:
        remote = RemoteRetriever(url, msgspec.structs.replace(about(), retrieval={"rrf_k": 60}), QUICK.machine)
        assert isinstance(one(remote, "ada"), SearchResult)
        for odd, status in ({"rrf_k": 5}, "409"), ({"unknown": 5}, "400"):
            remote = RemoteRetriever(url, msgspec.structs.replace(about(), retrieval=odd), QUICK.machine)
            assert status in complaint(remote)


@pytest.mark.parametrize(("status", "page"), [(404, b'{"detail":"Not Found"}'), (405, b""), (200, b"<html>")])
def test_a_server_that_tells_nothing_about_itself_is_taken_for_one_of_search_r1(status: int, page: bytes) -> None:
    def peer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        return (status, page) if (method, path) == ("GET", "/info") else (200 if path == "/retrieve" else 404, FOUND)

    with imitating(peer) as url:
        for spelling in (url, f"{url}/", f"{url}/retrieve"):
            retriever = opened(spelling, NO_GREP)
            assert isinstance(retriever, SearchR1Retriever)
            (found,) = run(retriever.search([SearchRequest("q", 1)]))
            assert [hit.chunk.chunk_id for hit in found.hits] == ["7"]


def passage(name: Any, contents: str, score: Any = None) -> dict[str, Any]:
    document = {"id": name, "contents": contents} if name is not None else {"contents": contents}
    return document if score is None else {"document": document, "score": score}


@contextmanager
def peer(answer: Callable[[dict[str, Any]], Any]) -> Iterator[SearchR1Retriever]:
    """A retriever over a server that answers the call of `/retrieve` with this."""

    def reply(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        assert (method, path) == ("POST", "/retrieve")
        made = answer(json.loads(body))
        return (200, made if isinstance(made, bytes) else json.dumps(made).encode())

    with imitating(reply) as url:
        yield SearchR1Retriever(url, NO_GREP)


def search(retriever: SearchR1Retriever, query: str = "q", k: int = 3, *exclude: str) -> SearchResult | RetrievalFault:
    (found,) = run(retriever.search([SearchRequest(query, k, frozenset(map(ChunkId, exclude)))]))
    return found


def test_passages_become_documents_of_one_chunk_with_the_first_line_as_title() -> None:
    passages = [passage("7", '"Ada Lovelace"\nShe wrote\na program.', 2.5), passage(8, "no title at all", 1.5)]
    with peer(lambda call: {"result": [passages]}) as retriever:
        found = search(retriever)
    assert isinstance(found, SearchResult)
    chunks = ("7", "Ada Lovelace", "She wrote\na program."), ("8", "", "no title at all")
    assert [hit.chunk for hit in found.hits] == [Chunk(ChunkId(n), DocId(n), 0, *texts) for n, *texts in chunks]
    assert found.hits[0].score == 2.5
    bare = [passage("z", "t\nz"), passage(None, "t\nx"), passage("a", "t\na")]
    with peer(lambda call: {"result": [bare]}) as retriever:
        assert ids(search(retriever)) == ["z", text_digest("t\nx"), "a"], "in their order, with ids of the contents"
    scores = ("b", "2.0"), ("c", 1), ("a", 2.0), ("b", 1.0)
    repeated = [passage(name, f"t\n{name}", score) for name, score in scores]
    with peer(lambda call: {"result": [repeated]}) as retriever:
        assert ids(search(retriever)) == ["a", "b", "c"], "in the total order, each once"


def test_all_queries_are_asked_at_once_and_as_many_more_passages_as_are_excluded() -> None:
    calls: list[dict[str, Any]] = []

    def answer(call: dict[str, Any]) -> Any:
        calls.append(call)
        found = [passage(f"{n:02d}", f"t\n{n}", 9.0 - n) for n in range(call["topk"])]
        return {"result": [found for _ in call["queries"]]}

    with peer(answer) as retriever:
        exclude = frozenset(ChunkId(f"{n:02d}") for n in range(4))
        asked = [SearchRequest("a", 2), SearchRequest("b \ud800", 3, exclude), SearchRequest("c", 0)]
        found = run(retriever.search(asked))
        assert run(retriever.search([])) == []
    assert calls == [{"queries": ["a", "b ?", "c"], "topk": 7, "return_scores": True}]
    assert [ids(result) for result in found] == [["00", "01"], ["04", "05", "06"], []]


def test_what_was_found_can_be_read_and_anything_else_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "KNOWN", 2)
    with peer(lambda call: {"result": [[passage(call["queries"][0], f"t\n{call['queries'][0]}", 1.0)]]}) as retriever:
        for name in ("a", "b"):
            search(retriever, name)
        assert run(retriever.read(DocId("a")))[0].text == "a"
        search(retriever, "c")
        assert [chunk.text for chunk in run(retriever.get([ChunkId("c"), ChunkId("a")]))] == ["c", "a"]
        assert isinstance(run(retriever.read(DocId("b"))), RetrievalFault)
        assert isinstance(run(retriever.get([ChunkId("a"), ChunkId("never")])), RetrievalFault)
        assert isinstance(run(retriever.grep("a", 1, 1.0)), RetrievalFault)


@pytest.mark.parametrize(
    "answer",
    [
        *(b"<html>", {}, {"result": []}, {"result": [["text"]]}, {"result": [[{"id": "1"}]]}),
        {"result": [[{"document": "text", "score": 1.0}]]},
        *({"result": [[passage("1", "t\nx", score)]]} for score in ("high", "nan", [1])),
        b'{"result":[[{"document":{"id":"1","contents":"t"},"score":NaN}]]}',
    ],
)
def test_an_answer_of_another_shape_is_a_fault_and_never_no_result(answer: Any) -> None:
    with peer(lambda call: answer) as retriever:
        assert isinstance(search(retriever), RetrievalFault)


def test_a_late_answer_is_a_fault_of_the_requests_that_it_is_too_late_for() -> None:
    def slow(call: dict[str, Any]) -> Any:
        time.sleep(0.3)
        return {"result": [[] for _ in call["queries"]]}

    with peer(slow) as retriever:
        late, well = run(retriever.search([SearchRequest("a", 1, deadline=0.1), SearchRequest("b", 1, deadline=5.0)]))
        assert (late, ids(well)) == (RetrievalFault("deadline"), [])
        (late,) = run(retriever.search([SearchRequest("a", 1, deadline=0.1)]))
        assert isinstance(late, RetrievalFault)
        assert "no answer within 0.1 s" in late.message


def test_grep_must_be_off_because_the_protocol_has_none() -> None:
    with pytest.raises(ConfigError, match=r"--set env\.grep\.on=false"):
        SearchR1Retriever("http://127.0.0.1:1", Config())


def test_the_identity_of_an_index_is_the_same_wherever_the_server_is_and_tells_the_unit() -> None:
    here, there = (SearchR1Retriever(f"http://host:{port}", NO_GREP).info for port in (1, 2))
    assert here == there
    chunks = SearchR1Retriever("http://host:1", load_config(None, ["env.grep.on=false", "index.unit=chunk"])).info
    assert (chunks.unit, here.unit) == ("chunk", "document")
    assert chunks.index_hash != here.index_hash
