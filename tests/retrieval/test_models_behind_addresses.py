"""Embedders and rerankers behind an address: what is sent in each shape, and that no wrong answer becomes a ranking."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness1.config import Config, Dense, Env, Index, Machine, Rerank, Retrieval
from harness1.config.machine import Model
from harness1.env.environment import SearchEnv
from harness1.errors import ConfigError, CorpusError, HarnessError, InfrastructureFault, Unreachable, UsageError
from harness1.records import DocId
from harness1.retrieval.build import add_documents, build_index
from harness1.retrieval.corpus import Document
from harness1.retrieval.index import build_hash, open_index
from harness1.retrieval.models import Embedder, HashEmbedder, Scorer, open_cross_encoder, open_embedder
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult
from harness1.retrieval.served import BYTES, FEW, divide
from tests.support import Ask, Reply, play, replying, search

pytestmark = pytest.mark.service

KEY = "sk-live-0123456789abcdef"
SIZE = 16
Body = dict[str, Any]
Lie = Callable[[list[Body]], Any]
HASHED = HashEmbedder(SIZE)
DOCUMENTS = [
    Document(DocId(name), name, text)
    for name, text in {
        "moon": "The moon orbits the earth once a month.",
        "sun": "The sun is a star of hot plasma.",
        "river": "A river carries water to the sea.",
        "bridge": "The bridge over the river was built in 1932.",
    }.items()
]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.http.client.BACKOFF_S", 0.01)


def machine(**settings: Any) -> Machine:
    return Machine(**{"attempts": 2, "call_deadline_s": 5.0, **settings})


def embedded(body: Body) -> list[Body]:
    """What a right server answers: the vectors in any order, three times as long as the unit."""
    vectors = 3 * HASHED.embed_documents(body["input"])
    made = [{"object": "embedding", "index": at, "embedding": row.tolist()} for at, row in enumerate(vectors)]
    return made[::-1]


def scores(query: str, texts: Sequence[str]) -> list[float]:
    """The share of the words of a query that a text has."""
    words = query.lower().split()
    return [sum(word in text.lower() for word in words) / max(len(words), 1) for text in texts]


class Server:
    """A server whose routes are functions of a body; a function may return a whole reply. It remembers what it got."""

    def __init__(self, **routes: Callable[[Body], Any]) -> None:
        self.routes, self.asked, self.keys = routes, list[Body](), set[str | None]()

    def __call__(self, ask: Ask) -> Reply:
        body = json.loads(ask.body)
        route = self.routes.get(ask.path.rpartition("/")[2])
        if route is None:
            return 404, {}, b'{"error": "no such route"}'
        self.asked.append(body)
        self.keys.add(ask.headers.get("Authorization"))
        made = route(body)
        return made if isinstance(made, tuple) else (200, {}, json.dumps(made).encode())


def refused(status: int, said: str) -> Reply:
    return status, {}, json.dumps({"error": said}).encode()


def openai(body: Body) -> Any:
    """OpenAI's own: it refuses what it does not know, blank texts and too many."""
    if extra := body.keys() - {"model", "input", "dimensions", "encoding_format", "user"}:
        return refused(400, f"Unrecognized request argument supplied: {min(extra)}")
    if not all(text.strip() for text in body["input"]) or len(body["input"]) > 2048:
        return refused(400, "'$.input' is invalid")
    return {"object": "list", "data": embedded(body), "model": body["model"]}


def vllm(body: Body) -> Any:
    assert body["truncate_prompt_tokens"] == -1
    return {"object": "list", "data": embedded(body), "model": body["model"]}


def vllm_rerank(body: Body) -> Any:
    assert body["truncate_prompt_tokens"] == -1
    found = [
        {"index": at, "document": {"text": text}, "relevance_score": score}
        for at, (text, score) in enumerate(
            zip(body["documents"], scores(body["query"], body["documents"]), strict=True)
        )
    ]
    return {"id": "r", "model": "m", "results": sorted(found, key=lambda each: -each["relevance_score"])}


def vllm_score(body: Body) -> Any:
    found = scores(body["text_1"], body["text_2"])
    return {"data": [{"index": at, "object": "score", "score": score} for at, score in enumerate(found)]}


def cohere(body: Body) -> Any:
    if extra := body.keys() - {"model", "query", "documents", "top_n", "max_tokens_per_doc"}:
        return refused(400, f"unknown field: {min(extra)}")
    found = [(score, at) for at, score in enumerate(scores(body["query"], body["documents"]))]
    ranked = sorted(found, reverse=True)[: body["top_n"]]
    return {"id": "r", "results": [{"index": at, "relevance_score": score} for score, at in ranked], "meta": {}}


def tei(body: Body) -> Any:
    if "texts" not in body:
        return 422, {}, b"Failed to deserialize the JSON body into the target type: missing field `texts`"
    if len(body["texts"]) > 32:
        return refused(413, f"batch size {len(body['texts'])} > maximum allowed batch size 32")
    found = [(score, at) for at, score in enumerate(scores(body["query"], body["texts"]))]
    return [{"index": at, "score": score} for score, at in sorted(found, reverse=True)]


def log_odds(body: Body) -> Any:
    """llama.cpp gives what the model says, without a sigmoid."""
    found = [20 * score - 15 for score in scores(body["query"], body["documents"])]
    return {"results": [{"index": at, "relevance_score": score} for at, score in enumerate(found)]}


def embedder(url: str, name: str = "bge", prefixes: tuple[str, str] = ("", ""), **settings: Any) -> Embedder:
    return open_embedder(Dense(model=f"openai:{name}@{url}/v1", prefixes=prefixes), machine(**settings))


def reranker(spec: str, **settings: Any) -> Scorer:
    return open_cross_encoder(machine(reranker=spec, **settings))


@pytest.mark.parametrize("route", [openai, vllm])
def test_texts_are_embedded_in_requests_of_bounded_size_and_in_their_order(route: Callable[[Body], Any]) -> None:
    server = Server(embeddings=route)
    texts = [f"river {number} bridge" for number in range(2 * FEW + 3)]
    with replying(server) as url:
        opened = embedder(url, prefixes=("query: ", "passage: "), embedder_key=KEY)
        server.asked.clear()
        made = opened.embed_documents([*texts, " ", "a \ud800"])
        asked = opened.embed_queries(["moon", "", "sun"])
    assert opened.dimensions == SIZE
    sent = [body["input"] for body in server.asked]
    assert sorted(map(len, sent)) == [2, 4, FEW, FEW]
    assert {body["model"] for body in server.asked} == {"bge"}
    expected = HASHED.embed_documents([f"passage: {text}" for text in texts])
    assert np.allclose(made[: len(texts)], expected, atol=1e-6)
    assert "passage: a ?" in next(part for part in sent if len(part) == 4)
    assert not made[-2].any()
    assert np.allclose(asked, HASHED.embed_documents(["query: moon", "", "query: sun"]), atol=1e-6)
    assert server.keys == {f"Bearer {KEY}"}


def test_the_model_its_dimensions_and_the_prefixes_identify_an_embedder_and_its_address_does_not() -> None:
    with replying(Server(embeddings=openai)) as one, replying(Server(embeddings=vllm)) as other:
        first = embedder(one).hash
        assert embedder(other).hash == first
        assert embedder(other, "e5").hash != first
        assert embedder(other, prefixes=("query: ", "")).hash != first
    short = Server(embeddings=lambda body: {"data": [{"index": 0, "embedding": [1.0]}]})
    with replying(short) as url:
        assert embedder(url).hash != first
    named = [
        Index(dense=Dense(model=f"openai:{each}/v1")) for each in ("a@http://one", "a@http://other", "b@http://one")
    ]
    assert build_hash(named[0]) == build_hash(named[1]) != build_hash(named[2])


def test_an_index_is_searched_through_another_machine_with_the_same_model(tmp_path: Path) -> None:
    with replying(Server(embeddings=openai)) as url:
        built = build_index(DOCUMENTS, tmp_path / "one", Index(dense=Dense(model=f"openai:bge@{url}/v1")))
    second = Server(embeddings=vllm)
    with replying(second) as url:
        model = f"openai:bge@{url}/v1"
        again = build_index(DOCUMENTS, tmp_path / "two", Index(dense=Dense(model=model)))
        assert again.index_hash == built.index_hash
        config = Config(Env(retrieval=Retrieval(mode="dense")), machine=machine(embedder=model))
        retriever = open_retriever(str(tmp_path / "one"), config)
        second.asked.clear()
        for wanted in (2, 3):
            (found,) = asyncio.run(retriever.search([SearchRequest("water of a river", wanted)]))
            assert isinstance(found, SearchResult)
            assert found.hits[0].chunk.doc_id == "river"
        assert len(second.asked) == 1, "queries are remembered"
        add_documents(
            [Document(DocId("sea"), "sea", "The sea is salt.")], tmp_path / "one", machine=machine(embedder=model)
        )
        assert second.asked[-1]["input"] == ["sea\nThe sea is salt."], "others have their vectors in the index"
        with pytest.raises(CorpusError, match=r"another embedding model: set machine\.embedder"):
            open_retriever(str(tmp_path / "one"), Config(machine=machine(embedder=model.replace("bge", "e5"))))


LIES: dict[str, Lie] = {
    "one too few": lambda data: {"data": data[1:]},
    "one too many": lambda data: {"data": [*data, data[0] | {"index": len(data)}]},
    "an index twice": lambda data: {"data": [*data, data[0]]},
    "indexes from 1": lambda data: {"data": [each | {"index": each["index"] + 1} for each in data]},
    "nothing": lambda data: {"data": []},
    "other dimensions": lambda data: {"data": [each | {"embedding": [1.0] * (SIZE + 1)} for each in data]},
    "no dimensions": lambda data: {"data": [each | {"embedding": []} for each in data]},
    "zeros": lambda data: {"data": [each | {"embedding": [0.0] * SIZE} for each in data]},
    "too large numbers": lambda data: {"data": [each | {"embedding": [1e300] * SIZE} for each in data]},
    "not a number": lambda data: {"data": [each | {"embedding": [float("nan")] * SIZE} for each in data]},
    "null": lambda data: {"data": [each | {"embedding": [None] * SIZE} for each in data]},
    "a list": lambda data: [each["embedding"] for each in data],
    "an error with status 200": lambda data: {"error": {"message": "out of memory"}},
    "too many bytes": lambda data: {"data": data, "filling": "x" * (17 << 20)},
    "a wrong key": lambda data: refused(401, "no"),
    "no such model": lambda data: refused(404, "no such model"),
    "a refusal": lambda data: refused(400, "no"),
    "an overload": lambda data: refused(503, "busy"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_answer_of_an_embedder_is_a_fault_and_never_a_ranking(tmp_path: Path, lie: str) -> None:
    honest = [True]
    server = Server(embeddings=lambda body: openai(body) if honest[0] else LIES[lie](embedded(body)))
    with replying(server) as url:
        model = f"openai:bge@{url}/v1"
        build_index(DOCUMENTS, tmp_path, Index(dense=Dense(model=model)))
        config = Config(machine=machine())
        retriever = open_retriever(str(tmp_path), config)
        honest[0] = False
        found = asyncio.run(retriever.search([SearchRequest("moon", 3), SearchRequest("sun", 3)]))
        assert all(isinstance(each, RetrievalFault) and url in each.message for each in found), found
        with pytest.raises(InfrastructureFault, match=r"\(2 attempts\)"):
            play(SearchEnv(config.env, retriever, machine=config.machine), search("moon"))
        if lie != "other dimensions":
            with pytest.raises((InfrastructureFault, Unreachable)):
                embedder(url)
        honest[0] = True
        (found,) = asyncio.run(retriever.search([SearchRequest("moon", 3)]))
        assert isinstance(found, SearchResult), "a fault is not remembered"


RERANKERS: dict[str, tuple[str, Callable[[Body], Any]]] = {
    "vllm": ("/v1/rerank", vllm_rerank),
    "vllm's base": ("/v1", vllm_rerank),
    "vllm's scores": ("/score", vllm_score),
    "cohere": ("/v2/rerank", cohere),
    "tei": ("", tei),
    "llama.cpp": ("/rerank", log_odds),
}


@pytest.mark.parametrize("kind", RERANKERS)
def test_each_shape_of_rerankers_is_found_out_and_ranks(tmp_path: Path, kind: str) -> None:
    place, route = RERANKERS[kind]
    server = Server(**{("score" if place.endswith("score") else "rerank"): route})
    build_index(DOCUMENTS, tmp_path, Index())
    with replying(server) as url:
        ranking = Retrieval(rerank=Rerank(on=True))
        served = machine(reranker=f"bge@{url}{place}", reranker_key=KEY, embedder_key="another")
        retriever = open_retriever(str(tmp_path), Config(Env(retrieval=ranking), machine=served))
        asked = len(server.asked)
        found = asyncio.run(retriever.search([SearchRequest("built river", 4), SearchRequest("water sea river", 4)]))
        assert [each.hits[0].chunk.doc_id for each in found if isinstance(each, SearchResult)] == ["bridge", "river"]
        assert len(server.asked) == asked + 2
        assert server.keys == {f"Bearer {KEY}"}
        assert {body["model"] for body in server.asked} == {"bge"}
        many = [("river", f"text {number}") for number in range(70)]
        assert len(open_cross_encoder(served).score([*many, *many])) == 140
        texts = [len(body.get("texts") or body.get("documents") or body["text_2"]) for body in server.asked[-3:]]
        assert texts[-1:] == [70] if kind != "tei" else sorted(texts) == [6, 32, 32]


def test_the_model_identifies_a_reranker_or_else_its_address() -> None:
    with replying(Server(rerank=cohere)) as one, replying(Server(rerank=tei)) as other:
        assert reranker(f"bge@{one}/rerank").hash == reranker(f"bge@{other}").hash
        unnamed = {reranker(f"{one}/rerank").hash, reranker(f"{other}/rerank").hash, reranker(f"bge@{other}").hash}
        assert len(unnamed) == 3


def test_log_odds_rank_as_probabilities_do() -> None:
    """Those of one query may all be below 0."""
    pairs = [("built river", text) for text in ("built river", "river", "none")]
    with replying(Server(rerank=log_odds)) as url:
        opened = reranker(f"{url}/rerank")
        assert opened.score(pairs).tolist() == [5, -5, -15]
        assert opened.stances(pairs).round(3).tolist() == [pytest.approx([0.993, 0]), pytest.approx([0.007, 0]), [0, 0]]


WRONG: dict[str, Lie] = {
    "one too few": lambda found: {"results": found[1:]},
    "an index twice": lambda found: {"results": [*found[1:], found[1]]},
    "indexes beyond": lambda found: {"results": [each | {"index": 7} for each in found]},
    "nothing": lambda found: {"results": []},
    "no score": lambda found: {"results": [{"index": each["index"]} for each in found]},
    "not a number": lambda found: {"results": [each | {"relevance_score": float("nan")} for each in found]},
    "beyond numbers": lambda found: (200, {}, b'{"results": [{"index": 0, "relevance_score": 1e999}]}'),
    "another object": lambda found: {"ranking": found},
    "too many bytes": lambda found: {"results": found, "filling": "x" * (17 << 20)},
    "no route": lambda found: refused(404, "no"),
    "an overload": lambda found: refused(429, "busy"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_of_a_reranker_is_a_fault_and_never_a_ranking(tmp_path: Path, wrong: str) -> None:
    honest = [True]
    right = vllm_rerank
    server = Server(rerank=lambda body: right(body) if honest[0] else WRONG[wrong](right(body)["results"]))
    build_index(DOCUMENTS, tmp_path, Index())
    with replying(server) as url:
        ranking = Retrieval(rerank=Rerank(on=True))
        config = Config(Env(retrieval=ranking), machine=machine(reranker=f"bge@{url}/v2/rerank"))
        retriever = open_retriever(str(tmp_path), config)
        honest[0] = False
        (found,) = asyncio.run(retriever.search([SearchRequest("the river and the sea", 3)]))
        assert isinstance(found, RetrievalFault)
        assert url in found.message
        with pytest.raises((InfrastructureFault, Unreachable)):
            open_cross_encoder(config.machine)


def test_a_server_that_asks_to_wait_is_given_the_time() -> None:
    waits: list[bool] = []

    def busy(body: Body) -> Any:
        if waits and waits.pop():
            return 429, {"Retry-After": "1"}, b'{"error": "slow down"}'
        return openai(body)

    with replying(Server(embeddings=busy)) as url:
        opened = embedder(url)
        waits.append(True)
        begin = time.monotonic()
        assert opened.embed_queries(["moon"]).any()
        assert time.monotonic() - begin > 1


def test_a_slow_server_misses_the_deadline_of_a_query_and_not_that_of_documents() -> None:
    slow = [0.0]

    def sleepy(body: Body) -> Any:
        time.sleep(slow[0])
        return openai(body)

    with replying(Server(embeddings=sleepy)) as url:
        opened = embedder(url, call_deadline_s=0.5, model=Model(timeout_s=10.0))
        slow[0] = 1.5
        begin = time.monotonic()
        with pytest.raises(InfrastructureFault, match=r"no answer within 0\.5 s"):
            opened.embed_queries(["moon"])
        assert time.monotonic() - begin < 1.4
        assert opened.embed_documents(["moon"]).any()


def test_where_nothing_answers_the_address_is_named_and_what_it_lacks() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9/v1/embeddings.*is the server running"):
        open_embedder(Dense(model="openai:bge@http://127.0.0.1:9/v1"), machine())
    with replying(Server()) as url:
        with pytest.raises(Unreachable, match=r"up to and including the /v1"):
            open_embedder(Dense(model=f"openai:bge@{url}/nowhere"), machine())
        for name in (f"openai:{url}/v1", f"openai:@{url}/v1", "openai:bge"):
            with pytest.raises(UsageError, match=r"write openai:MODEL@http"):
                open_embedder(Dense(model=name), machine())
    with (
        replying(Server(rerank=lambda body: refused(400, f"no model {body['model']}"))) as url,
        pytest.raises(InfrastructureFault, match=r"400 no model bge$"),
    ):
        reranker(f"bge@{url}")


def test_no_key_and_no_password_is_stored_or_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"machine\.embedder_key") as caught:
        Dense(model=f"openai:bge@http://me:{KEY}@host/v1")
    assert KEY not in str(caught.value)
    parrot = lambda body: refused(401, f"Incorrect key {KEY}")  # noqa: E731
    with replying(Server(embeddings=parrot, rerank=parrot)) as url:
        login = url.replace("//", f"//me:{KEY}@")
        for opening in (
            lambda: embedder(url, embedder_key=KEY),
            lambda: embedder(url, embedder=f"openai:bge@{login}/v1"),
            lambda: reranker(url, reranker_key=KEY),
            lambda: reranker(f"bge@{login}"),
        ):
            with pytest.raises(HarnessError) as refusal:
                opening()
            assert KEY not in str(refusal.value)
    with replying(Server(embeddings=openai)) as url:
        settings = Index(dense=Dense(model=f"openai:bge@{url}/v1"))
        build_index(DOCUMENTS, tmp_path, settings, machine=machine(embedder_key=KEY))
        open_index(tmp_path)
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    shown = machine(embedder_key=KEY, reranker_key=KEY, reranker=f"bge@http://me:{KEY}@host/rerank")
    assert KEY not in repr(shown)
    assert shown.public().reranker == "bge@http://host/rerank"


def test_texts_are_divided_by_number_and_by_bytes() -> None:
    texts = ["a" * (BYTES // 2), "б" * (BYTES // 8), "c" * (BYTES // 4), "d", "e" * (2 * BYTES), "f", "g", "h"]
    parts = [[text[0] for text in part] for part in divide(texts, 3)]
    assert parts == [["a", "б", "c"], ["d"], ["e"], ["f", "g", "h"]]
    assert list(divide([], 3)) == []
