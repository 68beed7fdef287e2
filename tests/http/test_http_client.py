"""One client for every server: answers are of the kind asked for, failures are values, and secrets stay inside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import msgspec
import pytest

from harness1.http.client import HttpClient, HttpFault, error_text
from harness1.plain import without_secrets

HOST = "127.0.0.1"
KEY = "sk-proj-Ab12Cd34Ef56"


class Ask(msgspec.Struct):
    """What a server of these tests was asked."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Reply = tuple[int, Mapping[str, str], bytes]


@contextmanager
def replying(reply: Callable[[Ask], Reply]) -> Iterator[str]:
    """The URL of a server on loopback; the function may take its time, for each request has a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, made = reply(Ask(self.command, self.path, dict(self.headers), body))
            with suppress(ConnectionError):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(made)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(made)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def posted(client: HttpClient, body: bytes = b"{}", timeout_s: float = 5.0) -> dict[str, int] | HttpFault:
    return asyncio.run(client.post("/path", body, dict[str, int], timeout_s))


@pytest.mark.service
def test_an_answer_is_of_the_kind_asked_for_and_the_headers_go_with_every_request() -> None:
    asked: list[Ask] = []

    def reply(ask: Ask) -> Reply:
        asked.append(ask)
        return 200, {}, b'{"a": 1}'

    with replying(reply) as url:
        client = HttpClient(url, {"Authorization": f"Bearer {KEY}"})
        assert posted(client, b'{"q": 2}') == {"a": 1}
        assert asyncio.run(client.get("/other", dict[str, int], 5.0)) == {"a": 1}
    assert [(ask.method, ask.path, ask.body) for ask in asked] == [
        ("POST", "/path", b'{"q": 2}'),
        ("GET", "/other", b""),
    ]
    assert all(ask.headers["Authorization"] == f"Bearer {KEY}" for ask in asked)
    assert asked[0].headers["Content-Type"] == "application/json"


@pytest.mark.service
@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b'{"error": {"message": "Incorrect key", "type": "invalid"}}', "401 Incorrect key"),
        (500, b'{"error": "down"}', "500 down"),
        (422, b'{"detail": "no such field"}', "422 no such field"),
        (503, b"<html>busy</html>", "503 <html>busy</html>"),
        (307, b"", "307"),
        (200, b'{"a": "word"}', "unexpected answer"),
        (200, b"\xff", "unexpected answer"),
        (200, b"[" * 100_000, "unexpected answer"),
    ],
)
def test_what_is_no_answer_is_a_fault_with_status_and_reason(status: int, body: bytes, says: str) -> None:
    with replying(lambda ask: (status, {"Location": "/elsewhere"}, body)) as url:
        fault = posted(HttpClient(url))
    assert isinstance(fault, HttpFault)
    assert fault.status == status
    assert f"{url}/path: {says}" in fault.message


@pytest.mark.service
@pytest.mark.parametrize(
    ("value", "least", "most"),
    [("7", 7, 7), ("0.5", 0.5, 0.5), ("-3", 0, 0), ("a date", 850, 901)],
)
def test_how_long_a_server_asks_to_wait_is_told(value: str, least: float, most: float) -> None:
    said = formatdate(time.time() + 900, usegmt=True) if value == "a date" else value
    with replying(lambda ask: (429, {"Retry-After": said}, b"")) as url:
        fault = posted(HttpClient(url))
    assert isinstance(fault, HttpFault)
    assert fault.retry_after_s is not None
    assert least <= fault.retry_after_s <= most


@pytest.mark.service
@pytest.mark.parametrize("value", ["", "soon", "nan", "inf"])
def test_a_wait_that_is_no_time_is_left_out(value: str) -> None:
    with replying(lambda ask: (429, {"Retry-After": value}, b"")) as url:
        fault = posted(HttpClient(url))
    assert isinstance(fault, HttpFault)
    assert fault.retry_after_s is None


@pytest.mark.service
def test_silence_and_refused_connections_have_no_status() -> None:
    def slow(ask: Ask) -> Reply:
        time.sleep(0.3)
        return 200, {}, b"{}"

    with replying(slow) as url:
        client = HttpClient(url)
        late = posted(client, timeout_s=0.05)
    assert late == HttpFault(f"{url}/path: no answer within 0.05 s")
    refused = posted(client)
    assert isinstance(refused, HttpFault)
    assert refused.status is None
    assert "Cannot connect" in refused.message


@pytest.mark.service
def test_no_message_holds_a_key_or_a_password() -> None:
    parrot = lambda ask: (401, {}, b"you sent " + repr(ask.headers).encode() + b" and plain-secret")  # noqa: E731
    with replying(parrot) as url:
        keyed = posted(HttpClient(url, {"Authorization": "Bearer plain-secret"}))
        other = posted(HttpClient(url, {"x-api-key": "plain-secret"}))
        login = posted(HttpClient(url.replace("//", "//user:plain-secret@")))
    dead = posted(HttpClient("http://user:plain-secret@127.0.0.1:1", {"x-api-key": KEY}))
    strange = posted(HttpClient(url, {"Authorization": "Bearer plain-secret\nX: y"}))
    client = HttpClient("http://127.0.0.1:1")
    query = asyncio.run(client.get("/path?api_key=plain-secret&q=1", dict[str, int], 5.0))
    for fault in (keyed, other, login, dead, strange, query):
        assert isinstance(fault, HttpFault)
        assert "secret" not in fault.message
        assert KEY not in fault.message
        assert "user" not in fault.message.partition("you sent")[0]


@pytest.mark.parametrize(
    "text",
    [
        f"Incorrect API key provided: {KEY}.",
        f'{{"api_key": "{KEY[8:]}"}}',
        f"http://host/v1?api_key={KEY[8:]}&x=1",
        f"http://host/v1?key={KEY[8:]}",
        f"X-Api-Key: {KEY[8:]}",
        f"Authorization: Bearer {KEY[8:]}",
        f"'authorization' : 'basic {KEY[8:]}'",
        f"Bearer {KEY[8:]}",
    ],
)
def test_what_looks_like_a_key_is_hidden(text: str) -> None:
    assert KEY[8:] not in without_secrets(text)
    assert "***" in without_secrets(text)


@pytest.mark.parametrize(
    "text", ["Missing bearer token in header", "key error: model_x", "Basic checks failed", "api keys"]
)
def test_words_about_keys_stay(text: str) -> None:
    assert without_secrets(text) == text


def test_the_reason_of_a_server_is_found_in_the_forms_of_many() -> None:
    for body in (
        b'{"error": {"message": "no model", "code": 404}}',
        b'{"type": "error", "error": {"type": "x", "message": "no model"}}',
        b'{"object": "error", "message": "no model"}',
        b'{"error": "no model"}',
        b'{"detail": "no model"}',
        b"no model",
    ):
        assert error_text(body) == "no model"
    assert error_text(b'{"error": {"code": 5}}') == "{'code': 5}"
    assert len(error_text(b"x" * 10_000)) == 300
    assert error_text(f"key {KEY}".encode() * 100).count(KEY) == 0
