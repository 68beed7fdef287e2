"""One client for every server: answers are of the kind asked for, failures are values, and secrets stay inside."""

import asyncio
import time
from email.utils import formatdate

import pytest

from harness1.http.client import HttpClient, HttpFault, error_text
from harness1.plain import without_secrets
from tests.support import Ask, Reply, replying

KEY = "sk-proj-Ab12Cd34Ef56"


def posted(client: HttpClient, body: bytes | None = b"{}", timeout_s: float = 5.0) -> dict[str, int] | HttpFault:
    return asyncio.run(client.ask("/path", body, dict[str, int], timeout_s))


@pytest.mark.service
def test_an_answer_is_of_the_kind_asked_for_and_the_headers_go_with_every_request() -> None:
    asked: list[Ask] = []

    def reply(ask: Ask) -> Reply:
        asked.append(ask)
        return 200, {}, b'{"a": 1}'

    with replying(reply) as url:
        client = HttpClient(url, {"Authorization": f"Bearer {KEY}"})
        assert posted(client, b'{"q": 2}') == {"a": 1}
        assert posted(client, None) == {"a": 1}
    sent = [(ask.method, ask.path, ask.body) for ask in asked]
    assert sent == [("POST", "/path", b'{"q": 2}'), ("GET", "/path", b"")]
    assert all(ask.headers["Authorization"] == f"Bearer {KEY}" for ask in asked)
    assert asked[0].headers["Content-Type"] == "application/json"


@pytest.mark.service
def test_no_answer_leaves_a_cookie_and_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []

    def reply(ask: Ask) -> Reply:
        asked.append(ask)
        return 200, {"Set-Cookie": "visitor=7"}, b"{}"

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def twice(url: str) -> list[dict[str, int] | HttpFault]:
        client = HttpClient(url.replace("127.0.0.1", "localhost"))
        return [await client.ask("/", None, dict[str, int], 5.0) for _ in range(2)]

    with replying(reply) as url:
        assert asyncio.run(twice(url)) == [{}, {}]
    assert not any("Cookie" in ask.headers for ask in asked)


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
        (200, b"\x1f\x8b", "DecodingError: a compressed answer (gzip)"),
        (200, b"1" * 200_001, "an answer larger than 200000 bytes"),
    ],
)
def test_what_is_no_answer_is_a_fault_with_status_and_reason(
    status: int, body: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness1.http.client.ANSWER_BYTES", 200_000)
    headers = {"Location": "/elsewhere"} | ({"Content-Encoding": "gzip"} if body[:1] == b"\x1f" else {})
    with replying(lambda ask: (status, headers, body)) as url:
        fault = posted(HttpClient(url))
    assert isinstance(fault, HttpFault)
    assert fault.status == (None if "gzip" in says else status)
    assert f"{url}/path: {says}" in fault.message


NO_DAYS = [f"Mon, 01 Jan {year} 00:00:00 GMT" for year in ("99999", "9" * 11, "9" * 5000)]
NO_DAYS += [f"Mon, 01 Jan 2020 00:00:00 +{'9' * 400}"]


@pytest.mark.service
def test_how_long_a_server_asks_to_wait_is_told_unless_it_is_no_time() -> None:
    date, asked = formatdate(time.time() + 900, usegmt=True), ["7", "0.5", "-3", "", "soon", "nan", "inf", *NO_DAYS]
    with replying(lambda ask: (429, {"Retry-After": [date, *asked][len(waits)]}, b"")) as url:
        waits: list[float | None] = []
        for _ in (date, *asked):
            fault = posted(HttpClient(url))
            assert isinstance(fault, HttpFault)
            waits.append(fault.retry_after_s)
    assert 850 <= (waits.pop(0) or 0) <= 901
    assert waits == [7, 0.5, 0, *(None for _ in waits[3:])]


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
    query = asyncio.run(client.ask("/path?api_key=plain-secret&q=1", None, dict[str, int], 5.0))
    for fault in (keyed, other, login, dead, strange, query):
        assert isinstance(fault, HttpFault)
        assert "secret" not in fault.message
        assert KEY not in fault.message
        assert "user" not in fault.message.partition("you sent")[0]


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"Incorrect API key provided: {KEY}.",
            f'{{"api_key": "{KEY[8:]}"}}',
            f"http://host/v1?api_key={KEY[8:]}&x=1",
        ),
        *(f"http://host/v1?key={KEY[8:]}", f"X-Api-Key: {KEY[8:]}", f"Authorization: Bearer {KEY[8:]}"),
        *(f"'authorization' : 'basic {KEY[8:]}'", f"Bearer {KEY[8:]}"),
    ],
)
def test_what_looks_like_a_key_is_hidden_and_words_about_keys_stay(text: str) -> None:
    assert KEY[8:] not in without_secrets(text)
    assert "***" in without_secrets(text)
    for words in ("Missing bearer token in header", "key error: model_x", "Basic checks failed", "api keys"):
        assert without_secrets(words) == words


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
