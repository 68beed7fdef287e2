"""Answers that come as streams: joined into what a server without streams sends, and ended when enough is said."""

from __future__ import annotations

import asyncio
import json
from itertools import permutations
from typing import Any

import msgspec
import pytest

from harness1.errors import InfrastructureFault, Overflow, Refusal
from harness1.http.chat_stream import ChatStream
from harness1.http.model_endpoint import ModelEndpoint
from tests.support import replying

EVENTS = {"Content-Type": "text/event-stream"}


def event(finish: str | None = None, **delta: Any) -> bytes:
    chunk = {"choices": [{"finish_reason": finish, "index": 0, "delta": delta}], "object": "chat.completion.chunk"}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def part(arguments: str, index: int = 0, **fields: Any) -> dict[str, Any]:
    named = {"name": fields.pop("name")} if "name" in fields else {}
    return {"index": index, **fields, "function": {**named, "arguments": arguments}}


def joined(*events: bytes, step: int = 7) -> dict[str, Any]:
    stream, sent = ChatStream(lambda message: False), b"".join(events)
    for at in range(0, len(sent), step):
        assert not stream.feed(sent[at : at + step])
    (choice,) = stream.completion()["choices"]
    return choice


def test_text_thoughts_and_calls_are_joined_wherever_the_bytes_are_divided() -> None:
    begin = event(role="assistant", content=None)
    said = joined(begin, b": ping\n\n", event(reasoning_content="Hm"), event(content="Öl"), event("length"), step=1)
    assert said["message"] == {"role": "assistant", "content": "Öl", "reasoning_content": "Hm"}
    assert said["finish_reason"] == "length"
    calls = event(tool_calls=[part("", id="a", name="search", type="function")])
    calls += event(tool_calls=[part('{"q"')]) + event(tool_calls=[part(": 1}")])
    calls += event(tool_calls=[part("{}", 1, id="b", name="end")]) + event("tool_calls") + b"data: [DONE]\n\n"
    first, second = joined(begin, calls)["message"]["tool_calls"]
    assert first == {"index": 0, "id": "a", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}
    assert (second["id"], second["function"]) == ("b", {"name": "end", "arguments": "{}"})
    alike = [part("{}", id="a", name="x"), part("{}", id="b", name="y", extra_content={"google": 1})]
    one, other = joined(event(tool_calls=alike), event("stop"))["message"]["tool_calls"]
    assert (one["id"], other["id"], other["extra_content"]) == ("a", "b", {"google": 1})


def test_an_answer_ends_at_the_same_event_however_its_bytes_are_divided() -> None:
    sent = b"".join(event(content=word) for word in ("one ", "call ", "and ", "more")) + event("stop")
    for step in (1, 7, len(sent)):
        stream = ChatStream(lambda message: "call" in (message["content"] or ""))
        assert any(stream.feed(sent[at : at + step]) for at in range(0, len(sent), step))
        assert stream.completion()["choices"][0]["message"]["content"] == "one call ", step


@pytest.mark.parametrize("name", ["content", "reasoning", "role", "anything"])
def test_a_part_of_another_type_takes_the_place_of_what_was_there(name: str) -> None:
    values = ("a", 7, ["b"], True, "c", {"d": 1}, ["e"], 1.5, [])
    for first, second in permutations(values, 2):
        if type(first) is not type(second):
            assert joined(event(**{name: first}), event("stop", **{name: second}))["message"][name] == second


def ask(sent: bytes, status: int = 200, headers: dict[str, str] = EVENTS, attempts: int = 1) -> Any:
    with replying(lambda _: (status, headers, sent)) as url:
        endpoint = ModelEndpoint(f"{url}/v1", attempts=attempts)
        post = endpoint.post("/chat/completions", {"stream": True}, dict[str, Any], lambda message: False)
        return asyncio.run(post)["choices"][0]["message"]["content"]


@pytest.mark.service
def test_what_goes_wrong_in_a_stream_is_what_goes_wrong_without() -> None:
    whole = msgspec.json.encode({"choices": [{"message": {"content": "All."}}]})
    assert ask(whole, headers={"Content-Type": "application/json"}) == "All.", "not every server heeds `stream`"
    assert ask(event(content="All.") + event("stop")) == "All."
    for sent, error, says in (
        (event(content="Half"), InfrastructureFault, "broke off"),
        (b"data: <html>\n\n", InfrastructureFault, "no JSON object"),
        (event(content="x") + b'data: {"error":{"code":500,"message":"bad"}}\n\n', InfrastructureFault, "500 bad"),
        (b'data: {"error":{"code":400,"message":"no such model"}}\n\n', Refusal, "400 no such model"),
    ):
        with pytest.raises(error, match=says):
            ask(sent)
    said = {"code": 400, "message": "request (9156 tokens) exceeds the available context size (8192 tokens)"}
    with pytest.raises(Overflow):
        ask(msgspec.json.encode({"error": said}), 400, {"Content-Type": "application/json"})


@pytest.mark.service
def test_a_stream_may_be_as_long_as_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.http.client.ANSWER_BYTES", 200_000)
    for endless in (event(content="more ") * 10_000, b": ping\n\n" * 100_000):
        with pytest.raises(InfrastructureFault, match="an answer larger than 200000 bytes"):
            ask(endless + event("stop"))


@pytest.mark.service
def test_a_stream_is_ended_by_leaving_and_may_take_long_while_it_goes_on() -> None:
    written: list[str] = []

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        try:
            while len(written) < 1000:
                written.append("word ")
                writer.write(event(content=written[-1]))
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            written.append("left")

    async def read() -> str:
        async with await asyncio.start_server(write, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            endpoint = ModelEndpoint(f"http://{host}:{port}/v1", timeout_s=0.3, attempts=1)
            ended = lambda message: message["content"].count("word") >= 40  # noqa: E731
            found = await endpoint.post("/chat/completions", {"stream": True}, dict[str, Any], ended)
            await asyncio.sleep(0.3)
            return str(found["choices"][0]["message"]["content"])

    assert asyncio.run(read()).count("word") == 40, "0.8 s are more than 0.3 s"
    assert "left" in written
