"""The client of Search-R1's route, against servers that answer as those in the wild do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from harness1.config import Config, load_config
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.errors import ConfigError
from harness1.plain import text_digest
from harness1.policy.registry import open_policy
from harness1.records import Chunk, ChunkId, DocId, Status, Task
from harness1.retrieval.engines import remote as search_r1
from harness1.retrieval.engines.remote import SearchR1Retriever
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult, total_order
from tests.serving import imitating, serving
from tests.support import CORPUS, QUICK, WordRetriever, run

NO_GREP = load_config(None, ["env.grep.on=false", "machine.call_deadline_s=5.0"])


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


def ids(found: SearchResult | RetrievalFault) -> list[str]:
    assert isinstance(found, SearchResult), found
    return [hit.chunk.chunk_id for hit in found.hits]


def test_passages_become_documents_of_one_chunk_with_the_first_line_as_title() -> None:
    passages = [passage("7", '"Ada Lovelace"\nShe wrote\na program.', 2.5), passage(8, "no title at all", 1.5)]
    with peer(lambda call: {"result": [passages]}) as retriever:
        found = search(retriever)
    assert isinstance(found, SearchResult)
    first, second = found.hits
    assert (first.chunk, first.score) == (
        Chunk(ChunkId("7"), DocId("7"), 0, "Ada Lovelace", "She wrote\na program."),
        2.5,
    )
    assert second.chunk == Chunk(ChunkId("8"), DocId("8"), 0, "", "no title at all")


def test_bare_passages_keep_their_order_and_missing_ids_are_made_of_the_contents() -> None:
    with peer(
        lambda call: {"result": [[passage("z", "t\nz"), passage(None, "t\nx"), passage("a", "t\na")]]}
    ) as retriever:
        found = search(retriever)
    assert ids(found) == ["z", text_digest("t\nx"), "a"]


def test_all_queries_are_asked_at_once_and_as_many_more_passages_as_are_excluded() -> None:
    calls: list[dict[str, Any]] = []

    def answer(call: dict[str, Any]) -> Any:
        calls.append(call)
        return {
            "result": [[passage(f"{n:02d}", f"t\n{n}", 9.0 - n) for n in range(call["topk"])] for _ in call["queries"]]
        }

    with peer(answer) as retriever:
        exclude = frozenset(ChunkId(f"{n:02d}") for n in range(4))
        found = run(
            retriever.search([SearchRequest("a", 2), SearchRequest("b \ud800", 3, exclude), SearchRequest("c", 0)])
        )
        assert run(retriever.search([])) == []
    assert calls == [{"queries": ["a", "b ?", "c"], "topk": 7, "return_scores": True}]
    assert [ids(result) for result in found] == [["00", "01"], ["04", "05", "06"], []]


def test_hits_are_totally_ordered_and_each_passage_comes_once() -> None:
    passages = [
        passage("b", "t\nb", "2.0"),
        passage("c", "t\nc", 1),
        passage("a", "t\na", 2.0),
        passage("b", "t\nb", 1.0),
    ]
    with peer(lambda call: {"result": [passages]}) as retriever:
        found = search(retriever)
    assert ids(found) == ["a", "b", "c"]
    assert isinstance(found, SearchResult)
    scored = [(hit.chunk.chunk_id, hit.score) for hit in found.hits]
    assert total_order(scored[::-1]) == scored


def test_what_was_found_can_be_read_and_anything_else_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_r1, "KNOWN", 2)
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
        b"<html>",
        {},
        {"result": None},
        {"result": []},
        {"result": [["text"]]},
        {"result": [[{"document": "text", "score": 1.0}]]},
        {"result": [[{"id": "1"}]]},
        {"result": [[passage("1", "t\nx", "high")]]},
        {"result": [[passage("1", "t\nx", "nan")]]},
        b'{"result":[[{"document":{"id":"1","contents":"t"},"score":NaN}]]}',
        {"result": [[passage("1", "t\nx", [1])]]},
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


def test_our_own_server_is_a_peer_too_and_an_episode_runs_over_it() -> None:
    with serving(WordRetriever(CORPUS)) as url:
        retriever = SearchR1Retriever(url, NO_GREP)
        found = search(retriever, "lovelace daughter", 2)
        assert isinstance(found, SearchResult)
        assert (found.hits[0].chunk.title, found.hits[0].chunk.text) == (CORPUS[0].title, CORPUS[0].text)
        env = SearchEnv(NO_GREP.env, retriever, machine=QUICK)
        episode = run(rollout(env, open_policy("scripted", {}), Task("t", "Where did the father of Ada Lovelace die?")))
    assert episode.status is Status.COMPLETED
    assert "byron#0" in episode.pool
