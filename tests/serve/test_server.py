"""The sockets of the retrieval service on loopback, and the command in a process."""

import asyncio
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import Config
from harness1.errors import MissingExtra, UsageError
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult
from harness1.serve import server
from harness1.serve.retrieve import RetrievalService
from harness1.serve.server import OWN_FILES, answering, most_connections, serve
from harness1.serve.service import ServiceLimits
from tests.cli.commands import command_in_process
from tests.serving import HOST, process_serving, serving
from tests.support import CORPUS, WordRetriever, chunk, run

SMALL = ServiceLimits(body_bytes=2000, body_s=0.2)
JSON = b"Host: localhost\r\nContent-Type: application/json\r\n"


def posting(path: str, body: bytes, headers: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n%s" % (path.encode(), JSON, headers, len(body), body)


def fetch(url: str, method: str, path: str, data: bytes | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request(method, path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def test_a_server_answers_over_http_and_refuses_what_is_too_large() -> None:
    with serving(WordRetriever(CORPUS), limits=SMALL) as url:
        assert fetch(url, "GET", "/health") == (200, {"status": "ok"})
        assert fetch(url, "POST", "/retrieve", b'{"queries":["poet"],"topk":1}')[0] == 200
        status, found = fetch(url, "POST", "/retrieve", b" " * 2001)
        assert (status, "2000 bytes" in found["error"]) == (413, True)
        assert fetch(url, "DELETE", "/retrieve")[0] == 405
        assert fetch(url, "GET", "/retrieve/") == (404, fetch(url, "GET", "/retrieve/")[1])


def test_a_body_that_does_not_arrive_or_cannot_be_read_is_refused() -> None:
    late, odd = b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    with serving(WordRetriever(CORPUS), limits=SMALL) as url:
        for rest, status in ((late, b"408"), (odd, b"400")):
            with connected(url) as client:
                client.sendall(b"POST /retrieve HTTP/1.1\r\n" + JSON + rest)
                assert client.recv(100).split()[1] == status


class Surprising(WordRetriever):
    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        raise KeyError("an inner secret")


def raw(url: str, request: bytes) -> tuple[int, str, Any]:
    """Status, content type and JSON of the answer to what may be no HTTP at all."""
    with connected(url) as client:
        client.sendall(request)
        response = http.client.HTTPResponse(client)
        response.begin()
        return response.status, response.headers["Content-Type"], json.loads(response.read())


def test_what_nobody_foresaw_is_500_in_json_without_internals_and_a_traceback_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(Surprising(CORPUS)) as url:
        for path, call in (("/search", b'{"requests":[{"query":"a","k":1}]}'), ("/retrieve", b'{"queries":["a"]}')):
            assert fetch(url, "POST", path, call) == (500, {"error": "Internal Server Error"})
        assert fetch(url, "GET", "/health")[0] == 200
    assert caplog.text.count("Traceback") == 2
    assert "an inner secret" in caplog.text


def test_what_is_no_request_is_refused() -> None:
    with serving(WordRetriever(CORPUS)) as url:
        for request in (
            b"garbage\r\n\r\n",
            b"GET /",
            b"GET /info HTTP/1.1\r\nX: ",
            b"GET /info HTTP/1.1\r\nX: y\r\n" * 2,
        ):
            with connected(url) as client:
                client.sendall(request + b"a" * 10_000)
                assert client.recv(100).startswith(b"HTTP/1.1 400")
        assert fetch(url, "GET", "/health")[0] == 200


def connected(url: str) -> socket.socket:
    return socket.create_connection((HOST, int(url.rsplit(":", 1)[1])), timeout=5)


def received(client: socket.socket) -> int:
    count = 0
    with suppress(ConnectionError):
        while part := client.recv(1 << 20):
            count += len(part)
    return count


def test_a_client_that_sends_no_whole_head_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(client: socket.socket) -> None:
        for letter in b"GET /info HTTP/1.1\r\n" * 5:
            client.sendall(bytes([letter]))
            time.sleep(0.05)

    monkeypatch.setattr(server, "IDLE_S", 0.3)
    with serving(WordRetriever(CORPUS)) as url, connected(url) as silent, connected(url) as dripping:
        assert received(silent) == 0
        with pytest.raises(ConnectionError):
            drip(dripping)


def test_a_client_that_does_not_take_its_answer_is_cut_off_and_one_that_waits_for_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(WordRetriever):
        async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
            await asyncio.sleep(1.5)
            return await super().search(requests)

    monkeypatch.setattr(server, "IDLE_S", 0.3)
    big = [chunk(f"d{number}#0", "x" * 100_000) for number in range(200)]
    call = json.dumps({"chunk_ids": [each.chunk_id for each in big]}).encode()
    asked = posting("/get", call, b"Connection: close\r\n")
    with serving(Slow(big)) as url, connected(url) as prompt, connected(url) as greedy:
        prompt.sendall(asked)
        assert received(prompt) > 20_000_000
        greedy.sendall(asked)
        assert fetch(url, "POST", "/retrieve", b'{"queries":["x"]}')[0] == 200
        assert received(greedy) < 20_000_000


def test_the_command_names_the_extra_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = command_in_process(monkeypatch, capsys)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for verb in (["retrieve", "--index", "x", "--port", "0"], ["proxy", "--upstream", "x", "--record", str(tmp_path)]):
        code, _, told = command("serve", *verb)
        assert (code, len(told.splitlines())) == (2, 1)
        assert str(MissingExtra("uvicorn", "serve")) in told


def test_a_connection_too_many_waits_until_another_has_gone() -> None:
    with serving(WordRetriever(CORPUS), limits=msgspec.structs.replace(SMALL, connections=2)) as url:
        kept = [connected(url) for _ in range(2)]
        time.sleep(0.1)
        with connected(url) as late:
            late.settimeout(0.3)
            late.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            with pytest.raises(TimeoutError):
                late.recv(100)
            kept.pop().close()
            late.settimeout(5.0)
            answer = late.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
        kept.pop().close()


def test_a_connection_stays_open_between_requests_while_there_is_room() -> None:
    with serving(WordRetriever(CORPUS)) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        sockets = set()
        for _ in range(3):
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            sockets.add(connection.sock)
        assert len(sockets) == 1
        connection.close()


def test_a_client_that_leaves_with_its_whole_answer_does_not_cancel_what_answered() -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"whole", "more_body": scope["path"] != "/whole"})
            await asyncio.sleep(0.2)
            ended.append(scope["path"])
        except asyncio.CancelledError:
            ended.append(f"cancelled {scope['path']}")
            raise

    async def serves() -> None:
        async with answering(app, ServiceLimits(), HOST, 0) as port:
            for path in ("/whole", "/part"):
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                await reader.readuntil(b"whole")
                writer.close()
                await asyncio.sleep(0.4)

    run(serves())
    assert ended == ["/whole", "cancelled /part"]


def test_connections_leave_files_to_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert most_connections(ServiceLimits()) == 1024 - OWN_FILES
    assert most_connections(ServiceLimits(connections=10)) == 10
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert most_connections(ServiceLimits()) == ServiceLimits().connections


def test_a_server_may_open_all_files_that_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen: list[int] = []

    def ready(_: int) -> None:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
        serve(RetrievalService(WordRetriever(CORPUS), Config()).app, ServiceLimits(), HOST, 0, ready)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == [hard]


def test_a_port_that_is_taken_is_an_error_of_the_user() -> None:
    async def scene(host: str, port: int) -> None:
        async with answering(RetrievalService(WordRetriever(CORPUS), Config()).app, ServiceLimits(), host, port):
            pass

    with socket.create_server((HOST, 0)) as taken, pytest.raises(UsageError, match="cannot listen"):
        run(scene(HOST, taken.getsockname()[1]))
    with pytest.raises(UsageError, match=r"nowhere\.invalid"):
        run(scene("nowhere.invalid", 0))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "world"
    subprocess.run([sys.executable, "-m", "harness1", "index", "world:60", "--out", str(folder)], check=True)
    return folder


@pytest.mark.service
@pytest.mark.parametrize(("end", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_command_ends_cleanly_on_a_signal(index: Path, end: signal.Signals, code: int) -> None:
    with process_serving(index) as (process, url):
        idle = socket.create_connection((HOST, int(url.rsplit(":", 1)[1])))
        assert fetch(url, "GET", "/info")[1]["index"]["documents"] == 60
        process.send_signal(end)
        _, complaint = process.communicate(timeout=15)
        assert process.returncode == code
        assert "Traceback" not in complaint
        idle.close()
