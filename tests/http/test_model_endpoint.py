"""The server of a model is asked patiently and boundedly; what the user must mend is said at once."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from harness1.config import load_config
from harness1.errors import ConfigError, InfrastructureFault, Overflow, Refusal, Unreachable, Unreadable
from harness1.http.model_endpoint import Completer, ModelEndpoint, verifier_endpoint
from tests.http.test_http_client import KEY
from tests.support import Ask, Reply, replying

Numbers = dict[str, int]
WELL: Reply = (200, {}, b'{"a": 1}')


class Script:
    """Answers with each reply in turn, the last one for ever."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.replies, self.asked = list(replies), list[Ask]()

    def __call__(self, ask: Ask) -> Reply:
        self.asked.append(ask)
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


def endpoint(url: str, **options: object) -> ModelEndpoint:
    return ModelEndpoint(url, **{"key": KEY, "timeout_s": 5.0, **options})


def posted(asked: ModelEndpoint, body: object = None) -> Numbers:
    return asyncio.run(asked.post("/chat/completions", body, Numbers))


@pytest.mark.service
def test_a_body_is_sent_as_json_with_the_key_and_nothing_that_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    script = Script([WELL])
    with replying(script) as url:
        asked = endpoint(f"{url}/v1/", key=f" {KEY}\n")
        assert posted(asked, {"b": [1]}) == posted(asked, b'{"b":[1]}') == {"a": 1}
        posted(endpoint(f"{url}/v1/#x", key=""), {"b": [1]})
        posted(endpoint(f"{url}/v1".replace("//", "//me:secret@"), key=""), {"b": [1]})
    assert {(ask.path, ask.body) for ask in script.asked} == {("/v1/chat/completions", b'{"b":[1]}')}
    keys = [ask.headers.get("Authorization") for ask in script.asked]
    assert keys == [f"Bearer {KEY}", f"Bearer {KEY}", None, "Basic bWU6c2VjcmV0"]
    assert {ask.headers["Accept"] for ask in script.asked} == {"application/json"}
    usual = {"host", "user-agent", "accept", "accept-encoding", "connection", "content-type", "content-length"}
    assert {name.lower() for name in script.asked[2].headers} == usual


@pytest.mark.service
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
def test_what_may_pass_is_tried_again(status: int) -> None:
    script = Script([(status, {}, b"busy"), (200, {}, b"<html>"), WELL])
    with replying(script) as url:
        assert posted(endpoint(url)) == {"a": 1}
    assert len(script.asked) == 3


@pytest.mark.service
@pytest.mark.parametrize(
    ("status", "raised"),
    [*((each, Unreachable) for each in (401, 403, 404)), *((each, Refusal) for each in (307, 400, 413, 422))],
)
def test_what_no_other_try_would_mend_is_said_at_once_in_the_words_of_the_server(
    status: int, raised: type[Refusal | Unreachable]
) -> None:
    script = Script([(status, {}, b'{"error": {"message": "it is filtered"}}'), WELL])
    with replying(script) as url, pytest.raises(raised, match=f"{status} it is filtered") as caught:
        posted(endpoint(url))
    assert (caught.value.status, len(script.asked), isinstance(caught.value, Overflow)) == (status, 1, False)


@pytest.mark.service
@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ("This model's maximum context length is 8192 tokens. Your messages resulted in 9000 tokens.", Overflow),
        ("The decoder prompt (length 9000) is longer than the maximum model length of 8192.", Overflow),
        ("The input (9000 tokens) is longer than the model's context length (8192 tokens).", Overflow),
        ("the request exceeds the available context size, try increasing it", Overflow),
        ("prompt is too long: 210000 tokens > 200000 maximum", Overflow),
        ("The input token count (9000) exceeds the maximum number of tokens allowed (8192).", Overflow),
        ("Please reduce the length of the messages or completion.", Overflow),
        ("`inputs` tokens + `max_new_tokens` must be <= 4096.", Overflow),
        ("'max_tokens' is too large: 32760. This model's maximum context length is 32768 tokens.", Overflow),
        ("'max_tokens' is too large: 40000. This model's maximum context length is 32768 tokens.", Refusal),
    ],
)
def test_a_prompt_that_is_too_long_is_told_from_other_refusals(said: str, refusal: type[Refusal]) -> None:
    """Where the setting alone leaves no room, no prompt is too long."""
    body = msgspec.json.encode({"error": {"message": said}})
    with replying(lambda _: (400, {}, body)) as url, pytest.raises(Refusal) as caught:
        posted(endpoint(url))
    assert type(caught.value) is refusal


@pytest.mark.service
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (500, "Failed to parse tool call arguments as JSON: parse error at line 1, column 217"),
        (500, "Failed to parse input at pos 0: <|channel|>"),
        (500, "The model produced output that does not match the expected peg-native format"),
        (400, "Could not finish the message because max_tokens or model output limit was reached."),
    ],
)
def test_an_output_that_its_server_cannot_read_is_not_asked_for_again(status: int, said: str) -> None:
    script = Script([(status, {}, msgspec.json.encode({"error": {"message": said}}))])
    with replying(script) as url, pytest.raises(Unreadable, match=said[:20]):
        posted(endpoint(url))
    assert len(script.asked) == 1


def test_a_server_that_no_attempt_ever_reached_is_no_fault_of_an_episode() -> None:
    with pytest.raises(
        Unreachable, match=r"127\.0\.0\.1:9/chat/completions: Cannot connect: connection refused \(2 attempts\)"
    ):
        posted(endpoint("http://127.0.0.1:9", attempts=2))


@pytest.mark.service
def test_a_route_that_is_not_found_says_how_far_the_address_must_reach() -> None:
    def complaint(base: str, path: str) -> str:
        with pytest.raises(Unreachable) as caught:
            asyncio.run(endpoint(base).post(path, {}, Numbers))
        return str(caught.value)

    with replying(lambda _: (404, {}, b"Not Found")) as url:
        assert complaint(url, "/chat/completions").endswith("the address must reach up to and including the /v1")
        for base, path in ((f"{url}/v1", "/chat/completions"), (url, "/v1/completions"), (url, "/pause")):
            assert complaint(base, path).endswith("404 Not Found")


@pytest.mark.service
@pytest.mark.parametrize(
    ("status", "body", "says"), [(503, b'{"message": "full"}', "503 full"), (200, b"[]", "unexpected answer")]
)
def test_after_the_last_attempt_it_is_a_fault_without_secrets(status: int, body: bytes, says: str) -> None:
    script = Script([(status, {}, body)])
    with replying(script) as url, pytest.raises(InfrastructureFault) as caught:
        posted(endpoint(url.replace("//", "//me:secret@"), key="", attempts=2))
    said = str(caught.value)
    assert (says in said, said.startswith(url), said.endswith("(2 attempts)"), "secret" in said) == (*[True] * 3, False)
    assert len(script.asked) == 2


@pytest.mark.service
def test_a_silent_server_is_tried_again_and_then_a_fault() -> None:
    asked = []

    def silent(ask: Ask) -> Reply:
        asked.append(ask)
        time.sleep(0.5)
        return WELL

    with replying(silent) as url, pytest.raises(InfrastructureFault, match=r"no answer within 0\.2 s \(2 attempts\)"):
        posted(endpoint(url, timeout_s=0.2, attempts=2))
    assert len(asked) == 2


@pytest.mark.service
def test_it_waits_as_long_as_the_server_asks_and_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    script = Script([(429, {"Retry-After": "2"}, b""), (503, {"Retry-After": "86400"}, b""), (503, {}, b""), WELL])
    with replying(script) as url:
        asked = endpoint(url, attempts=4)
        monkeypatch.setattr("harness1.http.client.BACKOFF_S", 0.5)
        monkeypatch.setattr("harness1.http.client.asyncio.sleep", note)
        posted(asked)
    assert 2.5 <= waits[0] <= 3.0
    assert 61.0 <= waits[1] <= 62.0
    assert 2.0 <= waits[2] <= 4.0


@pytest.mark.service
def test_requests_in_flight_are_bounded_on_every_loop() -> None:
    lock, inside, most = threading.Lock(), [0], [0]

    def crowded(ask: Ask) -> Reply:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        with lock:
            inside[0] -= 1
        return WELL

    async def crowd(asked: ModelEndpoint) -> list[Numbers]:
        return await asyncio.gather(*(asked.post("/", None, Numbers) for _ in range(12)))

    with replying(crowded) as url:
        asked = endpoint(url, concurrency=3)
        for _ in range(3):
            assert asyncio.run(crowd(asked)) == [{"a": 1}] * 12
        assert most == [3]
        assert not asked.client._lines


@pytest.mark.service
def test_neither_the_time_of_others_nor_a_wait_for_another_try_takes_a_place() -> None:
    def reply(ask: Ask) -> Reply:
        time.sleep(0.1)
        return (503, {"Retry-After": "30"}, b"") if msgspec.json.decode(ask.body) == "bad" else WELL

    async def crowd(asked: ModelEndpoint) -> list[Numbers]:
        waiting = asyncio.create_task(asked.post("/", "bad", Numbers))
        await asyncio.sleep(0.05)
        found = await asyncio.wait_for(asyncio.gather(*(asked.post("/", "good", Numbers) for _ in range(8))), 5)
        waiting.cancel()
        return found

    with replying(reply) as url:
        assert asyncio.run(crowd(endpoint(url, concurrency=1, timeout_s=0.6, attempts=2))) == [{"a": 1}] * 8


class Strict:
    """A server that accepts neither the old name of a limit nor a temperature, and sends no streams."""

    def __init__(self) -> None:
        self.options: list[list[str]] = []

    async def post(self, path: str, body: Any, kind: type[Any], ended: Any = None) -> Any:
        self.options.append(sorted(body.keys() - {"model", "messages"}))
        assert ("stream" in body) == (ended is not None)
        if "max_tokens" in body:
            raise Refusal("400 'max_tokens' is not supported. Use 'max_completion_tokens' instead.")
        for name in ("temperature", "stream"):
            if name in body:
                raise Refusal(f"400 '{name}' does not support {body[name]}")
        return msgspec.convert({"choices": [{"message": {"content": "yes"}}]}, kind)


def test_a_model_that_refuses_the_names_of_options_is_asked_without_them() -> None:
    server = Strict()
    completer = Completer(server, "m", 9)
    assert [asyncio.run(completer.complete([], lambda _: False)).text for _ in range(2)] == ["yes", "yes"]
    assert server.options == [
        ["max_tokens", "stream", "temperature"],
        ["max_completion_tokens", "stream", "temperature"],
        ["max_completion_tokens", "stream"],
        *[["max_completion_tokens"]] * 2,
    ]


@pytest.mark.parametrize("said", ["max_completion_tokens", "temperature", "temperature and max_completion_tokens"])
def test_a_model_that_refuses_whatever_is_left_out_is_not_asked_for_ever(said: str) -> None:
    asked = list[Any]()

    class Stubborn:
        async def post(self, path: str, body: Any, kind: type[Any]) -> Any:
            asked.append(body)
            raise Refusal(said)

    with pytest.raises(Refusal, match=said):
        asyncio.run(Completer(Stubborn(), "m", 9).complete([]))
    assert len(asked) <= 3


def test_an_address_that_is_none_or_a_key_that_cannot_be_sent_is_refused_and_not_repeated() -> None:
    for url in ("", "localhost:8000", "ftp://host/v1", "http://", "http://host:99999/v1", "http://[::1/v1"):
        with pytest.raises(ConfigError, match="not the address of a model"):
            ModelEndpoint(url)
    for url, key in (("http://me:secret@host/v1", KEY), ("http://host/v1", "a\nsecret"), ("http://host/v1", "sécret")):
        with pytest.raises(ConfigError, match="http://host/v1: ") as caught:
            ModelEndpoint(url, key)
        assert not any(word in str(caught.value) for word in ("secret", "sécret"))
    assert ModelEndpoint("http://me:secret@host/v1").url == "http://host/v1"


def test_a_judge_is_asked_as_patiently_as_a_policy_and_as_seldom_at_once_as_episodes_are_played() -> None:
    settings = ["machine.concurrency=3", "machine.model.timeout_s=5", "machine.attempts=2"]
    judge = verifier_endpoint("http://h/v1", load_config(None, settings).machine)
    assert (judge._timeout_s, judge._attempts, judge.client._connections) == (5, 2, 3)
