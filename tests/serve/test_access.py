"""Who may call a server: known hosts, pages from nowhere else, JSON, and a token if there is one."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness1.config import Config, load_config
from harness1.errors import InfrastructureFault, UsageError
from harness1.http.client import read_token
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import SearchRequest, SearchResult
from harness1.rows.calls import Recorder, read_records
from harness1.serve.proxy import ProxyService
from harness1.serve.retrieve import RetrievalService
from harness1.serve.server import answering
from harness1.serve.service import Access
from tests.cli.commands import command_in_process
from tests.proxying import ANTHROPIC_PATH, LIMITS, OPENAI_PATH, Dice, ask, hermes, upstream_of
from tests.serving import HOST, Reply, asking, in_thread
from tests.support import CORPUS, WordRetriever, run

TOKEN = "a-token-of-sixteen-or-more"
WORDS = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}

SEARCH = b'{"queries":["poet"],"topk":1}'


def status(headers: dict[str, str], access: Access | None = None, path: str = "/retrieve") -> int:
    service = RetrievalService(WordRetriever(CORPUS), Config(), access=access)
    reply = run(asking(service.app, "GET" if path in ("/info", "/health") else "POST", path, SEARCH, headers))
    assert reply.kind == "application/json"
    assert reply.status == 200 or list(json.loads(reply.body)) == ["error"]
    return reply.status


OURS = ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "localhost.:1", "wiki.lan:8000", "[fe80::2]")
FOREIGN = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost@evil", "a:b")
SITES = ("https://evil.example", "null", "http://localhost.evil.example", "http://[", "")
KINDS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")
TOKENS = (TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é")
NAMED, GUARDED = Access(["Wiki.LAN", "fe80::2"]), Access(token=TOKEN)
NETWORK = Access(["0.0.0.0"], addresses=True)


@pytest.mark.parametrize(
    ("header", "values", "access", "answer"),
    [
        ("host", OURS, NAMED, 200),
        ("host", FOREIGN, NAMED, 421),
        ("host", ("192.168.1.5:8000",), NETWORK, 200),
        ("host", ("evil.example",), NETWORK, 421),
        ("origin", SITES, None, 403),
        ("origin", ("http://localhost:3000",), None, 200),
        ("content-type", KINDS, None, 415),
        ("content-type", ("Application/JSON; charset=utf-8",), None, 200),
        ("authorization", TOKENS, GUARDED, 401),
        ("x-api-key", (TOKEN[:-1],), GUARDED, 401),
        ("x-other", ("",), GUARDED, 401),
        ("authorization", (f"bearer {TOKEN}",), GUARDED, 200),
        ("x-api-key", (TOKEN,), GUARDED, 200),
    ],
)
def test_a_server_answers_by_its_own_names_to_its_own_pages_in_json_and_with_its_token(
    header: str, values: tuple[str, ...], access: Access | None, answer: int
) -> None:
    for value in values:
        assert status({header: value}, access) == answer, value
        if answer in (401, 421):
            assert [status({header: value}, access, path) for path in ("/info", "/nothing")] == [answer] * 2
        if answer in (401, 403, 421):
            assert status({header: value}, access, "/health") == 200


def test_a_page_at_an_address_of_its_own_may_not_call_a_server_of_a_network() -> None:
    for origin, answer in (("http://192.168.1.5:3000", 200), ("http://203.0.113.9", 403)):
        assert status({"host": "192.168.1.5:8000", "origin": origin}, NETWORK) == answer


@pytest.mark.parametrize("carrier", ["authorization", "x-api-key"])
def test_a_proxy_neither_records_a_token_nor_names_a_session_by_it(tmp_path: Path, carrier: str) -> None:
    model = Dice(hermes())
    sent = {carrier: f"Bearer {TOKEN}" if carrier == "authorization" else TOKEN}
    other = {name: value.replace(TOKEN, "another-token-of-nobody") for name, value in sent.items()}

    async def scene() -> list[Reply]:
        with Recorder(tmp_path) as recorder:
            proxy = ProxyService(upstream_of(model, model.chat), recorder.append, LIMITS, access=Access(token=TOKEN))
            known = [await ask(proxy, WORDS, path, sent) for path in (OPENAI_PATH, ANTHROPIC_PATH)]
            known.append(await ask(proxy, WORDS, OPENAI_PATH, sent, {"session": "episode-1"}))
            foreign = [{**sent, "host": "evil.example"}, {**sent, "content-type": "x"}]
            return [*known, *[await ask(proxy, WORDS, ANTHROPIC_PATH, each) for each in (other, *foreign)]]

    replies = run(scene())
    assert [reply.status for reply in replies] == [200, 200, 200, 401, 421, 415]
    assert json.loads(replies[3].body)["error"]["type"] == "authentication_error"
    sessions = [call.session_id for call in read_records(tmp_path)]
    assert sessions[2] == "episode-1"
    assert len(set(sessions[:3])) == 3
    assert all(TOKEN.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_remote_retriever_sends_the_token_of_a_file_and_never_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    quick = ["machine.attempts=1", "env.retrieval.mode=bm25"]
    served = load_config(None, quick)

    def opened() -> Any:
        service = RetrievalService(WordRetriever(CORPUS), served, access=Access(token=TOKEN))
        return answering(service.app, service.limits, HOST, 0)

    with in_thread(opened) as url:
        remote = open_retriever(url, load_config(None, [*quick, f"machine.token_file={file}"]))
        assert isinstance(run(remote.search([SearchRequest("poet", 1)]))[0], SearchResult)
        file.write_text("another-token-of-nobody")
        with pytest.raises(InfrastructureFault, match="401") as caught:
            open_retriever(url, load_config(None, [*quick, f"machine.token_file={file}"]))
    assert "nobody" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two words that are long enough", b"\xff" * 20, b"caf\xc3\xa9" * 9]
)
def test_a_file_without_a_token_is_an_error_that_does_not_repeat_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_token(str(tmp_path / "token"))
    assert "words" not in str(caught.value)
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="must hold one word"):
        read_token(str(tmp_path / "endless"))
    with pytest.raises(UsageError, match="No such file"):
        read_token(str(tmp_path / "nothing"))


def test_a_server_beyond_this_machine_needs_a_token_or_a_clear_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = command_in_process(monkeypatch, capsys)
    nowhere = ["--index", str(tmp_path / "nothing"), "--port", "0"]
    code, _, told = command("serve", "retrieve", *nowhere, "--host", "0.0.0.0")
    assert (code, len(told.splitlines()), "--token-file" in told, "--no-token" in told) == (2, 1, True, True)
    record = ["--upstream", "http://127.0.0.1:1/v1", "--record", str(tmp_path / "run")]
    code, _, told = command("serve", "proxy", *record, "--host", "0.0.0.0")
    assert (code, len(told.splitlines()), "--no-token" in told) == (2, 1, True)
    assert not (tmp_path / "run").exists()
    code, _, told = command("serve", "retrieve", *nowhere, "--host", "0.0.0.0", "--no-token")
    assert (code, "nobody is asked" in told, "nothing" in told) == (2, True, True)
    for name in ("wiki.lan:8463", "http://wiki.lan"):
        code, _, told = command("serve", "retrieve", *nowhere, "--allow-host", name)
        assert (code, "the name alone" in told) == (2, True)
