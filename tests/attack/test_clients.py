"""Hostile clients against our server, and hostile servers against our clients, on loopback."""

from __future__ import annotations

import gzip
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from harness1.config import Config, load_config
from harness1.errors import HarnessError
from harness1.http import client as http_client
from harness1.http.client import HttpClient
from harness1.http.model_endpoint import ModelEndpoint
from harness1.records import ChunkId, DocId
from harness1.retrieval.engines.remote import About, RemoteRetriever, SearchR1Retriever, ask_about
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, SearchRequest, SearchResult
from harness1.serve.retrieve import RetrievalService
from tests.attack.attack import Attack
from tests.serve.test_server import posting
from tests.serving import HOST, asking, serving
from tests.support import CORPUS, WordRetriever, run

SEARCH = b'{"queries":["poet"],"topk":1}'
CALLS: dict[str, Any] = {
    "/retrieve": {"queries": ["poet"], "topk": 1, "return_scores": True},
    "/search": {"requests": [{"query": "ada", "k": 2, "exclude": ["ada#0"], "deadline": 1.0}], "index_hash": None},
    "/grep": {"pattern": "a.b", "limit": 2, "deadline": 1.0},
    "/read": {"doc_id": "ada"},
    "/get": {"chunk_ids": ["ada#0", "miss#0"]},
}
REQUESTS = [posting(path, json.dumps(call).encode()) for path, call in CALLS.items()] + [
    b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    posting("/retrieve", gzip.compress(SEARCH, mtime=0), b"Content-Encoding: gzip\r\n"),
    posting("/retrieve", SEARCH, b"Expect: 100-continue\r\n"),
    posting("/retrieve", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"5\r\n{}   \r\n0\r\n\r\n",
]
JUNK = [
    *(b"\r\n", b"\0", b" ", b":", b"\xff\xfe", b"%", b"HTTP/1.1", b"9" * 30, b"[" * 5000, b"a" * 9000),
    *(b"Content-Length: 5\r\n", b"Host: evil\r\n", b"Transfer-Encoding: chunked\r\n"),
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
]

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)


def mutated(request: bytes, draw: random.Random) -> bytes:
    found = bytearray(request)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found) + 1)
        size = draw.choice((0, 1, draw.randint(1, 20), len(found)))
        found[at : at + size] = draw.choice((draw.randbytes(1), b"", draw.choice(JUNK)))
        found += draw.choice(REQUESTS) if draw.random() < 0.2 else b""
    return bytes(found)


def answer_to(port: int, sent: bytes, draw: random.Random) -> bytes:
    """What comes back at once, to bytes that are sent in one piece or in several, with an end or without."""
    with socket.create_connection((HOST, port), timeout=5) as client, suppress(ConnectionError, TimeoutError):
        for part in (sent[: len(sent) // 2], sent[len(sent) // 2 :]) if draw.random() < 0.2 else (sent,):
            client.sendall(part)
        if draw.random() < 0.1:
            with suppress(OSError):  # the server may have closed the connection
                client.shutdown(socket.SHUT_WR)
        client.settimeout(0.02)
        return client.recv(1 << 16)
    return b""


def test_no_bytes_break_the_server(attack: Attack, caplog: pytest.LogCaptureFixture) -> None:
    draw, statuses = attack.random("bytes"), dict[int, int]()
    with serving(WordRetriever(CORPUS)) as url:
        port = int(url.rsplit(":", 1)[1])
        for number in range(attack.times(4_000)):
            sent = mutated(draw.choice(REQUESTS), draw)
            answer = answer_to(port, sent, draw)
            if answer:
                status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0
                assert 100 <= status < 600, sent
                assert status != 500, sent
                statuses[status] = statuses.get(status, 0) + 1
            if number % 100 == 0:
                assert answer_to(port, REQUESTS[0], random.Random(1)).startswith(b"HTTP/1.1 200"), sent
    assert "Traceback" not in caplog.text
    attack.report("bytes sent to the server", requests=attack.times(4_000), answers=sum(statuses.values()))


def altered(value: Any) -> st.SearchStrategy[Any]:
    """A call like this one, with parts replaced by anything."""
    if isinstance(value, dict):
        parts = {name: st.one_of(altered(each), values) for name, each in value.items()}
        return st.one_of(st.fixed_dictionaries({}, optional=parts), values)
    return st.one_of(st.just(value), values, st.lists(values, max_size=3))


def test_no_json_breaks_the_server(attack: Attack) -> None:
    service = RetrievalService(WordRetriever(CORPUS), Config())

    def survives(asked: tuple[str, Any]) -> None:
        reply = run(asking(service.app, "POST", asked[0], json.dumps(asked[1]).encode()))
        assert reply.status in (200, 400, 409), reply
        assert reply.status == 200 or list(json.loads(reply.body)) == ["error"]

    calls = st.one_of(*(st.tuples(st.just(path), altered(call)) for path, call in CALLS.items()))
    attack.try_all(calls, survives, 4_000)
    attack.report("JSON sent to the server", calls=attack.times(4_000))


@contextmanager
def lying(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that answers every connection with what `answer` sends."""
    listener, open_now = socket.create_server((HOST, 0), backlog=64), list[socket.socket]()

    def one(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            peer.settimeout(5)
            peer.recv(1 << 16)
            answer(peer)

    def accept() -> None:
        with suppress(OSError):
            while True:
                open_now.append(listener.accept()[0])
                threading.Thread(target=one, args=(open_now[-1],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for each in open_now:
            each.close()
        thread.join(5)


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
GOOD = msgspec.json.encode({"answers": [{"result": {}}]})
PACKED = gzip.compress(b" " * 50_000_000, 1, mtime=0)
HUGE, ENDLESS = b"9" * 400, b"x" * 65_536


def endless(head: bytes, block: bytes) -> Callable[[socket.socket], None]:
    def answer(peer: socket.socket) -> None:
        peer.sendall(head)
        while True:
            peer.sendall(block)

    return answer


def said(answer: bytes, pause_s: float = 0.0) -> Callable[[socket.socket], None]:
    def answers(peer: socket.socket) -> None:
        for at in range(0, len(answer), 1 if pause_s else max(len(answer), 1)):
            peer.sendall(answer[at : at + 1] if pause_s else answer)
            time.sleep(pause_s)

    return answers


LIES: dict[str, Callable[[socket.socket], None]] = {
    "endless body": endless(OK + b"\r\n", ENDLESS),
    "endless chunks": endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n" % (len(ENDLESS), ENDLESS)),
    "endless headers": endless(OK, b"X-Header: " + b"x" * 1000 + b"\r\n"),
    "endless status": endless(b"HTTP/1.1 200 ", ENDLESS),
    "endless error": endless(b"HTTP/1.1 500 No\r\n\r\n", ENDLESS),
    "endless interim answers": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "drips": said(OK + b"Content-Length: 1000\r\n\r\n" + b" " * 1000, 0.05),
    "drips of a head": said(OK + b"X: " + b"x" * 1000, 0.05),
    "too short": said(OK + b"Content-Length: 1000\r\n\r\n{}"),
    "too long": said(OK + b"Content-Length: 2\r\n\r\n" + GOOD),
    "two lengths": said(OK + b"Content-Length: 2\r\nContent-Length: 30\r\n\r\n" + GOOD),
    "a length that is none": said(OK + b"Content-Length: -1\r\n\r\n" + GOOD),
    "a huge length": said(OK + b"Content-Length: " + HUGE + b"\r\n\r\n"),
    "a bad chunk": said(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "deep JSON": said(OK + b"\r\n" + b"[" * 1_000_000),
    "deep objects": said(OK + b"\r\n" + b'{"a":' * 500_000),
    "a huge number": said(OK + b'\r\n{"answers":' + HUGE * 100 + b"}"),
    "not UTF-8": said(OK + b'\r\n{"answers":"\xff\xfe"}'),
    "half a pair": said(OK + b'\r\n{"result":[[{"document":{"contents":"\\ud800"}}]]}'),
    "gzip": said(OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED) + PACKED),
    "gzip in gzip": said(OK + b"Content-Encoding: gzip, gzip\r\n\r\n" + gzip.compress(PACKED, mtime=0)),
    "a redirect": said(b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
    "a redirect to a file": said(b"HTTP/1.1 302 Go\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"),
    "nothing": said(b""),
    "noise": said(bytes(range(256)) * 20),
    "an old protocol": said(b"hello\n"),
    "a protocol that is none": said(b"HTTP/9.9 999 ?\r\n\r\n"),
    "an upgrade": said(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n" + ENDLESS),
}

QUICK = load_config(None, ["machine.attempts=1", "machine.call_deadline_s=0.6", "env.grep.on=false"])
ABOUT = About(IndexInfo("word-index", "document", 5, 5), {})


async def all_calls(url: str) -> int:
    """Let every client of ours ask a server; return how many calls ended in a fault. Anything else fails."""
    faults, remote, peer = 0, RemoteRetriever(url, ABOUT, QUICK.machine), SearchR1Retriever(url, QUICK)
    request = SearchRequest("poet", 3, frozenset([ChunkId("x")]), 0.6)
    for asked in (
        remote.search([request]),
        remote.grep("a", 2, 0.6),
        remote.read(DocId("ada")),
        remote.get([ChunkId("ada#0")]),
        peer.search([request]),
    ):
        found = await asked
        for each in found if isinstance(found, list) else [found]:
            assert isinstance(each, RetrievalFault | SearchResult | BadPattern | tuple)
            faults += isinstance(each, RetrievalFault)
    endpoint = ModelEndpoint(url, timeout_s=0.6, attempts=1)
    for other in (ask_about(url, QUICK.machine), endpoint.post("/chat/completions", {}, dict[str, int])):
        try:
            await other
        except HarnessError:
            faults += 1
    return faults


@pytest.mark.parametrize("lie", LIES)
def test_no_answer_of_a_server_breaks_our_clients(attack: Attack, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    monkeypatch.setattr(http_client, "ANSWER_BYTES", 2_000_000)
    monkeypatch.setattr("harness1.retrieval.engines.remote.GRACE_S", 0.0)
    sent, answer = [0], LIES[lie]

    class Counting:
        def __init__(self, peer: socket.socket) -> None:
            self.peer = peer

        def sendall(self, data: bytes) -> None:
            self.peer.sendall(data)
            sent[0] += len(data)

    began = time.monotonic()
    with lying(lambda peer: answer(Counting(peer))) as url:
        faults = run(all_calls(url))
    assert faults >= 5, "none of these is an answer to all"
    assert time.monotonic() - began < 30
    assert sent[0] < 200_000_000, "an endless answer is not read to its end"
    attack.report(f"server with {lie}", faults=faults)


def test_no_json_of_a_server_breaks_our_clients(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    passage = {"chunk_id": "ada#0", "doc_id": "ada", "index": 0, "title": "t", "text": "x"}
    hits = [{"chunk": passage, "score": 1.0}] * 2
    shapes = {
        "answers": [{"result": {"hits": hits, "stage_ms": {"bm25": 1.0}}}],
        "chunks": [passage] * 3,
        "result": [[{"document": {"id": "1", "contents": "t\nx"}, "score": 10**400}]],
    }
    said = b""

    async def exchange(*_: object, **__: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {}, said

    monkeypatch.setattr(HttpClient, "exchange", exchange)

    def survives(answer: Any) -> None:
        nonlocal said
        said = json.dumps(answer).encode()
        run(all_calls(f"http://{HOST}:1"))

    attack.try_all(st.one_of(altered(shapes), st.just(shapes)), survives, 1_000)
    attack.report("JSON sent to our clients", answers=attack.times(1_000))
