"""The recording proxy in tests: a model that plays dice over a script, the proxy with and without sockets, and agents
that reach it by the official clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness1.config import ChatPolicy, Config
from harness1.env.environment import choose
from harness1.env.render import Context
from harness1.models.backend import Backend, Grammar, SampledOutput
from harness1.models.calls import Message, Said, messages_of, tools_of
from harness1.models.chat_format import ChatFormat
from harness1.plain import digest
from harness1.policy.language_model import call_seed
from harness1.policy.policy import Decision
from harness1.records import Sampling, Task, ToolCall
from harness1.rows.calls import RecordedCall, read_records, recording
from harness1.serve.proxy import ProxyService
from harness1.serve.server import answering
from harness1.serve.service import ServiceLimits
from harness1.serve.upstreams import TokenUpstream, Upstream
from tests.serving import HOST, Reply, asking, in_thread
from tests.support import END, call, search
from tests.vocabularies import chat_format

OPENAI_PATH, ANTHROPIC_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SETTINGS = Config(policy=ChatPolicy(temperature=0.7, format_retries=0))
LIMITS = ServiceLimits(running=8, waiting=8, deadline_s=20.0)
SCRIPT: tuple[ToolCall | str, ...] = (
    search("poet"),
    search("Where did Lord Byron die?"),
    call("curate", add={"D1": "high"}),
    call("read_document", document="D1"),
    call("search_corpus", query='a "quoted" \n line, naïve 東京 <|im_end|>'),
    call("no_such_tool", x=1),
    "There is nothing to call.",
)


class Dice:
    """A backend that draws an output from a script by the digest of prompt and seed, in tokens that no tokenizer would
    make of it: a third of the characters stand alone. The sixth call and those behind it may end the episode."""

    version = 3
    hash = "dice"

    def __init__(self, chat: ChatFormat, script: Sequence[ToolCall | str] = SCRIPT) -> None:
        self.chat, self.script = chat, script
        self.calls: list[tuple[tuple[int, ...], Sampling, SampledOutput]] = []
        self.wait_s = 0.0
        self.cancelled = 0
        self.error: Exception | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        try:
            await asyncio.sleep(self.wait_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        draw = digest([list(prompt_ids), sampling.seed])
        said = self.script[int(draw[:8], 16) % len(self.script)]
        if len(self.calls) > 5 and int(draw[8], 16) < 4:
            said = END
        ids = [*self._said(said, draw), self.chat.stop_ids[0]]
        ids = ids[: sampling.max_tokens]
        logprobs = tuple(-int(draw[16:20], 16) / 65536 - place / 64 for place in range(len(ids)))
        stopped = ids[-1] == self.chat.stop_ids[0]
        made = SampledOutput(tuple(ids), logprobs, "stop" if stopped else "length", self.version, self.version)
        self.calls.append((tuple(prompt_ids), sampling, made))
        return made

    async def load_weights(self, folder: Path, version: int) -> None:
        raise NotImplementedError

    def _said(self, said: ToolCall | str, draw: str) -> list[int]:
        if isinstance(said, str):
            return self._shredded(f"{said} {draw[:4]}", draw)
        spoken = self.chat.format_action("", said)
        return [*self._shredded(f"I think {draw[:6]}.\n", draw), *spoken[:-1]]

    def _shredded(self, text: str, draw: str) -> list[int]:
        parts, start = [], 0
        for place in range(len(text)):
            if int(draw[place % 64], 16) < 5:
                parts += [text[start:place], text[place : place + 1]]
                start = place + 1
        return [token for part in [*parts, text[start:]] for token in self.chat.tokenizer.encode(part)]


def hermes() -> ChatFormat:
    return chat_format("hermes", "chatml")


def upstream_of(model: Backend, chat: ChatFormat, config: Config = SETTINGS) -> TokenUpstream:
    return TokenUpstream("hf:dice", model, chat, config)


async def ask(
    service: ProxyService,
    body: object,
    path: str = OPENAI_PATH,
    headers: Mapping[str, str] = {},
    query: Mapping[str, str] = {},
    method: str = "POST",
) -> Reply:
    sent = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return await asking(service.app, method, path, sent, headers, query)


def recorded(run: Path, upstream: Upstream, scene: Callable[[ProxyService], Awaitable[object]]) -> list[RecordedCall]:
    async def main() -> None:
        with recording(run, upstream.inputs) as recorder:
            await scene(ProxyService(upstream, recorder.append, LIMITS))

    asyncio.run(main())
    return list(read_records(run))


@contextmanager
def proxying(run: Path, upstream: Upstream, limits: ServiceLimits = LIMITS) -> Iterator[str]:
    with recording(run, upstream.inputs) as recorder:
        service = ProxyService(upstream, recorder.append, limits)
        with in_thread(lambda: answering(service.app, limits, HOST, 0)) as url:
            yield url


class Heard(NamedTuple):
    """What a client got: words, calls as (id, name, arguments), and whether it was cut."""

    text: str
    calls: list[tuple[str, str, dict[str, Any]]]
    cut: bool


Client = Callable[[list[Message], list[dict[str, Any]], int, int, str], Awaitable[Heard]]
"""Asks with messages and tools in OpenAI's form, a seed, the most tokens, and a session."""


def openai_client(url: str) -> Client:
    from openai import AsyncOpenAI

    async def asks(messages: list[Message], tools: list[dict[str, Any]], seed: int, room: int, session: str) -> Heard:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=session, max_retries=0) as client:
            asked: dict[str, Any] = {"messages": messages, "tools": tools, "seed": seed, "max_completion_tokens": room}
            text, calls, cut = "", dict[int, list[str]](), False
            async for chunk in await client.chat.completions.create(model="any", stream=True, **asked):
                for choice in chunk.choices:
                    text, cut = text + (choice.delta.content or ""), choice.finish_reason == "length"
                    for each in choice.delta.tool_calls or ():
                        calls.setdefault(each.index, [each.id, each.function.name, ""])[2] += each.function.arguments
            return Heard(text, [(call_id, name, json.loads(text)) for call_id, name, text in calls.values()], cut)

    return asks


def anthropic_client(url: str) -> Client:
    from anthropic import AsyncAnthropic

    async def asks(messages: list[Message], tools: list[dict[str, Any]], seed: int, room: int, session: str) -> Heard:
        async with AsyncAnthropic(base_url=url, api_key=session, max_retries=0) as client:
            system, turns = as_anthropic(messages)
            functions = [dict(tool["function"]) for tool in tools]
            given = [{"input_schema": each.pop("parameters"), **each} for each in functions]
            asked: dict[str, Any] = {"model": "any", "system": system, "messages": turns, "tools": given}
            asked |= {"max_tokens": room, "extra_body": {"seed": seed}}
            async with client.messages.stream(**asked) as events:
                made = await events.get_final_message()
            text = "".join(block.text for block in made.content if block.type == "text")
            uses = [block for block in made.content if block.type == "tool_use"]
            return Heard(text, [(use.id, use.name, use.input) for use in uses], made.stop_reason == "max_tokens")

    return asks


def responses_client(url: str) -> Client:
    from openai import AsyncOpenAI

    async def asks(messages: list[Message], tools: list[dict[str, Any]], seed: int, room: int, session: str) -> Heard:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=session, max_retries=0) as client:
            asked: dict[str, Any] = {"model": "any", "max_output_tokens": room, "extra_body": {"seed": seed}}
            asked |= {"tools": [{"type": "function", **tool["function"]} for tool in tools]}
            asked |= {"input": as_items(messages), "store": False}
            *_, last = [event async for event in await client.responses.create(stream=True, **asked)]
            uses = [each for each in last.response.output if each.type == "function_call"]
            calls = [(use.call_id, use.name, json.loads(use.arguments)) for use in uses]
            return Heard(last.response.output_text, calls, last.response.status == "incomplete")

    return asks


def as_items(messages: Sequence[Message]) -> list[dict[str, Any]]:
    items = list[dict[str, Any]]()
    for message in messages:
        if message["role"] == "tool":
            result = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **result})
            continue
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        for each in message.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": each["id"], **each["function"]})
    return items


def as_anthropic(messages: Sequence[Message]) -> tuple[str, list[dict[str, Any]]]:
    system, turns = "", list[dict[str, Any]]()
    for message in messages:
        if message["role"] == "system":
            system = message["content"]
        elif message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            turns.append({"role": "user", "content": [result]})
        elif message.get("tool_calls"):
            blocks = [{"type": "text", "text": message["content"]}] if message["content"] else []
            for each in message["tool_calls"]:
                named, given = each["function"], json.loads(each["function"]["arguments"])
                blocks.append({"type": "tool_use", "id": each["id"], "name": named["name"], "input": given})
            turns.append({"role": "assistant", "content": blocks})
        else:
            turns.append({"role": message["role"], "content": message["content"]})
    return system, turns


class AgentPolicy:
    """An agent that knows messages and no tokens."""

    name = hash = "agent"

    def __init__(self, client: Client, room: int) -> None:
        self.client, self.room = client, room

    def open(self, task: Task, seed: int) -> AgentSession:
        return AgentSession(self, digest([task.query, seed]))


class AgentSession:
    def __init__(self, policy: AgentPolicy, seed: str) -> None:
        self.policy, self.seed, self.turn = policy, seed, 0
        self.said: dict[int, Said] = {}

    async def act(self, context: Context) -> Decision:
        self.turn += 1
        asked = messages_of(context.pieces, self.said), tools_of(context.tools), call_seed(self.seed, self.turn, 0)
        heard = await self.policy.client(*asked, self.policy.room, "episode-1")
        if not heard.calls:
            return Decision(parse_error="the output was too long and is cut" if heard.cut else "there is no call")
        actions = tuple(ToolCall(name, arguments) for _, name, arguments in heard.calls)
        executed = heard.calls[actions.index(choose(actions)[0])][0]
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for call_id, name, arguments in heard.calls
        ]
        message = {"role": "assistant", "content": heard.text or None, "tool_calls": calls}
        self.said[self.turn] = Said(message, tuple(call_id for call_id, _, _ in heard.calls), executed)
        return Decision(actions, heard.text)

    def fork(self) -> AgentSession:
        raise NotImplementedError
