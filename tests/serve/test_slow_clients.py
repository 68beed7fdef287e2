"""Clients that are slow, greedy or silent, on loopback: what they cost is bounded, and the others are answered."""

import asyncio
import gzip
import json
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from harness1.config import Config
from harness1.serve import server, service
from harness1.serve.retrieve import RetrievalService
from harness1.serve.service import ServiceLimits
from tests.serve.test_server import connected, fetch, posting, raw, received
from tests.serving import asking, serving
from tests.support import CORPUS, WordRetriever, chunk, run

BIG = [chunk(f"d{number}#0", "x" * 100_000) for number in range(200)]
ALL = posting("/get", json.dumps({"chunk_ids": [each.chunk_id for each in BIG]}).encode())
"""Asks for 20 MB, more than the system buffers for a connection."""
SEARCH = b'{"queries":["poet"],"topk":1}'
PACKED = gzip.compress(SEARCH, mtime=0)


def test_clients_that_never_read_give_their_connections_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PRESSED_S", 0.3)
    with serving(WordRetriever(BIG), limits=ServiceLimits(connections=4)) as url:
        greedy = [connected(url) for _ in range(4)]
        for each in greedy:
            each.sendall(ALL)
        assert fetch(url, "GET", "/health")[0] == 200
        assert any(received(each) < 20_000_000 for each in greedy)
        for each in greedy:
            each.close()


def test_answers_that_nobody_takes_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.1)
    with serving(WordRetriever(BIG), limits=ServiceLimits(answer_bytes=30_000_000)) as url:
        greedy = [connected(url) for _ in range(3)]
        for each in greedy:
            each.sendall(ALL.replace(b"Content-Length", b"Connection: close\r\nContent-Length"))
            time.sleep(0.3)
        assert fetch(url, "POST", "/retrieve", b'{"queries":["x"],"topk":1}')[0] == 200
        taken = [received(each) for each in greedy]
        assert max(taken[:2]) < 20_000_000 < taken[2], "who has been waited for longest makes room"
        for each in greedy:
            each.close()


def test_a_client_that_takes_its_answer_in_drops_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 1.0)
    monkeypatch.setattr(server, "PACE", 50_000_000)
    with serving(WordRetriever(BIG)) as url, connected(url) as client:
        client.sendall(ALL)
        count, patience = 0, time.monotonic() + 10
        with suppress(ConnectionError):
            while (part := client.recv(500_000)) and time.monotonic() < patience:
                count += len(part)
                time.sleep(0.1)
        assert time.monotonic() < patience
        assert count < 20_000_000


def test_a_refused_body_is_not_read_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.5)
    with serving(WordRetriever(CORPUS), limits=ServiceLimits(body_bytes=2000)) as url, connected(url) as client:
        client.sendall(posting("/retrieve", b"").replace(b"Content-Length: 0", b"Content-Length: 999999999999"))
        patience = time.monotonic() + 10
        with suppress(ConnectionError):
            while time.monotonic() < patience:
                client.sendall(b" " * 1_000_000)
        assert time.monotonic() < patience


async def turns_during(service: RetrievalService, body: bytes) -> tuple[int, int]:
    """The status of the answer to a compressed body, and how often the event loop ran other work meanwhile."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(other())
    await asyncio.sleep(0)
    reply = await asking(service.app, "POST", "/retrieve", body, {"content-encoding": "gzip"})
    working.cancel()
    return reply.status, turns


@pytest.mark.parametrize("size", [3_000_000, 300_000_000])
def test_a_body_is_inflated_in_small_steps_and_never_beyond_its_limit(size: int) -> None:
    packed = gzip.compress(b" " * size, 1)
    status, turns = run(turns_during(RetrievalService(WordRetriever(CORPUS), Config()), packed))
    inflated = min(size, ServiceLimits().body_bytes)
    assert status == (413 if size > inflated else 400)
    assert inflated / service.STEP <= turns + 2 <= 2 * inflated / service.STEP


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [
        *((PACKED, "gzip", 200), (PACKED, "X-GZIP", 200), (SEARCH, "identity", 200), (PACKED[:-9], "gzip", 400)),
        *((PACKED + b"more", "gzip", 400), (b"", "gzip", 400), (SEARCH, "br", 415)),
        (gzip.compress(PACKED, mtime=0), "gzip, gzip", 415),
    ],
)
def test_only_whole_bodies_in_known_encodings_are_read(body: bytes, coding: str, status: int) -> None:
    service = RetrievalService(WordRetriever(CORPUS), Config())
    assert run(asking(service.app, "POST", "/retrieve", body, {"content-encoding": coding})).status == status


def test_a_slow_sender_keeps_nobody_else_waiting() -> None:
    limits = ServiceLimits(running=1, waiting=1, body_s=20.0)
    with serving(WordRetriever(CORPUS), limits=limits) as url:
        slow = [connected(url) for _ in range(20)]
        for each in slow:
            each.sendall(posting("/retrieve", SEARCH)[:-5])
        assert fetch(url, "POST", "/retrieve", SEARCH)[0] == 200
        for each in slow:
            each.settimeout(0.01)
            with pytest.raises(TimeoutError):
                each.recv(1)
            each.settimeout(5.0)
            each.sendall(SEARCH[-5:])
            assert each.recv(100).startswith(b"HTTP/1.1 200")
            each.close()


def test_bodies_are_bounded_together_and_the_slowest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PRESSED_S", 1.0)
    limits = ServiceLimits(bodies_bytes=1_000_000)
    large = posting("/retrieve", SEARCH + b" " * 700_000)
    with serving(WordRetriever(CORPUS), limits=limits) as url, connected(url) as slow:
        slow.sendall(large[:600_000])
        time.sleep(0.3)
        assert raw(url, large)[0] == 503
        assert fetch(url, "POST", "/retrieve", SEARCH)[0] == 200, "small ones need no room"
        time.sleep(1.1)
        assert raw(url, large)[0] == 200
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
        assert raw(url, large)[0] == 200, "a body that is answered takes no room"


LONG = ServiceLimits(query_characters=100, id_characters=50, excluded=5)


@pytest.mark.parametrize(
    ("path", "call", "says"),
    [
        ("/retrieve", {"queries": ["a", "b" * 101]}, "at most 100"),
        ("/search", {"requests": [{"query": "b" * 101, "k": 1}]}, "at most 100"),
        ("/grep", {"pattern": "b" * 101, "limit": 1}, "at most 100"),
        ("/search", {"requests": [{"query": "b", "k": 1, "exclude": ["a", "b", "c"]}] * 2}, "at most 5"),
        ("/search", {"requests": [{"query": "b", "k": 1, "exclude": ["b" * 51]}]}, "at most 50"),
        ("/read", {"doc_id": "b" * 51}, "at most 50"),
        ("/get", {"chunk_ids": ["b" * 51]}, "at most 50"),
    ],
)
def test_queries_patterns_and_ids_are_bounded(path: str, call: Any, says: str) -> None:
    service = RetrievalService(WordRetriever(CORPUS), Config(), LONG)
    reply = run(asking(service.app, "POST", path, msgspec.json.encode(call)))
    assert (reply.status, says in json.loads(reply.body)["error"]) == (400, True)
