"""Whole episodes through the proxy by the official clients, and everything that can go wrong on a socket."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import ChatPolicy, Config, Env, Machine, Model
from harness1.episodes.rollout import rollout
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.policy import Policy
from harness1.records import Episode, Status, Task
from harness1.rows import prefix_merging
from harness1.rows.calls import RecordedCall, read_calls, read_records
from harness1.runs.files import read_stage
from harness1.serve.service import ServiceLimits
from harness1.serve.upstreams import ChatUpstream
from tests.proxying import (
    LIMITS,
    SETTINGS,
    AgentPolicy,
    Dice,
    anthropic_client,
    hermes,
    openai_client,
    proxying,
    responses_client,
    upstream_of,
)
from tests.serving import HOST, imitating
from tests.support import command_process, make_env, replying

pytestmark = pytest.mark.service

ENV = Env(max_turns=12)
QUICK = Machine(attempts=2)
CLIENTS = {"openai": openai_client, "anthropic": anthropic_client, "responses": responses_client}


def episode(policy: Policy, seed: int) -> Episode:
    task = Task("task", "Where did the father of Ada Lovelace die?")
    return asyncio.run(rollout(make_env(ENV), policy, task, seed=seed))


def in_process(model: Dice, seed: int) -> Episode:
    return episode(LanguageModelPolicy(model, model.chat, ENV.generation_reserve, SETTINGS.policy), seed)


def float32(values: Sequence[float]) -> tuple[float, ...]:
    import numpy as np

    return tuple(np.asarray(values, dtype=np.float32).tolist())


def long_episode() -> tuple[int, Dice, Episode]:
    """Return the seed of an episode in this process that has turns enough, its model, and itself."""
    models = ((seed, Dice(hermes())) for seed in range(100))
    played = ((seed, model, in_process(model, seed)) for seed, model in models)
    return next(each for each in played if len(each[2].turns) > 4)


@pytest.mark.parametrize("client", CLIENTS)
def test_an_episode_through_a_client_has_the_very_tokens_of_one_in_process(tmp_path: Path, client: str) -> None:
    seed, alone, expected = long_episode()
    served = Dice(hermes())
    with proxying(tmp_path, upstream_of(served, served.chat)) as url:
        agent = AgentPolicy(CLIENTS[client](url), ENV.generation_reserve)
        found = episode(agent, seed)
    assert [turn.action for turn in found.turns] == [turn.action for turn in expected.turns]
    assert (found.curated, found.status) == (expected.curated, expected.status)
    records = list(read_records(tmp_path))
    assert [(call.prompt_ids, call.sampling, call.output_ids, call.output_logprobs) for call in records] == [
        (prompt, sampling, made.output_ids, float32(made.output_logprobs)) for prompt, sampling, made in alone.calls
    ]
    assert {(call.version_start, call.status, call.session_id) for call in records} == {(3, 200, "episode-1")}
    assert [call.call_id for call in read_calls(tmp_path)] == [call.call_id for call in records]


WORDS = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}


def failing(
    tmp_path: Path, upstream: Any, limits: ServiceLimits = LIMITS
) -> tuple[list[int], list[str], list[RecordedCall]]:
    from anthropic import Anthropic
    from anthropic import APIStatusError as AnthropicError
    from openai import APIStatusError as OpenAIError
    from openai import OpenAI

    statuses, said = [], []
    with proxying(tmp_path, upstream, limits) as url:
        with pytest.raises(OpenAIError) as caught:
            OpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0).chat.completions.create(**WORDS)
        statuses.append(caught.value.status_code)
        said.append(caught.value.body["message"])
        with pytest.raises(AnthropicError) as told:
            Anthropic(base_url=url, api_key="a", max_retries=0).messages.create(**WORDS)
        statuses.append(told.value.status_code)
        assert told.value.body["type"] == "error"
        said.append(told.value.body["error"]["message"])
    records = list(read_records(tmp_path))
    assert [call.error for call in records] == said
    assert [call.status for call in records] == statuses
    assert not list(read_calls(tmp_path))
    return statuses, said, records


def chat_upstream(url: str) -> ChatUpstream:
    return ChatUpstream(url, "", Config(machine=QUICK))


def test_a_dead_upstream_is_an_error_of_the_provider_and_a_record_of_what_was_asked(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    statuses, said, records = failing(tmp_path, chat_upstream(f"http://{HOST}:{port}/v1"))
    assert statuses == [502, 502]
    assert "2 attempts" in said[0]
    assert all(call.request and call.request["messages"][-1]["content"] == "Hello" for call in records)


@pytest.mark.parametrize("garbage", [b"<html>", b'{"choices": []}'])
def test_an_upstream_that_answers_garbage_is_one_too(tmp_path: Path, garbage: bytes) -> None:
    with replying(lambda _: (200, {}, garbage)) as url:
        assert failing(tmp_path, chat_upstream(url))[0] == [502, 502]


def test_a_slow_upstream_is_cut_off_in_time(tmp_path: Path) -> None:
    model = Dice(hermes())
    model.wait_s = 30.0
    begun = time.monotonic()
    statuses, said, records = failing(
        tmp_path, upstream_of(model, model.chat), msgspec.structs.replace(LIMITS, deadline_s=0.1)
    )
    assert time.monotonic() - begun < 10
    assert statuses == [504, 504]
    assert "0.1 s" in said[0]
    assert model.cancelled == 2
    assert all(call.prompt_ids and not call.output_ids for call in records)


def test_the_key_of_an_agent_stays_here_and_ours_goes_to_the_server(tmp_path: Path) -> None:
    seen = []

    def reply(asked: Any) -> tuple[int, dict[str, str], bytes]:
        seen.append(asked.headers.get("Authorization"))
        return 200, {}, b'{"choices": [{"message": {"content": "Hi."}}]}'

    from openai import OpenAI

    config = Config(machine=msgspec.structs.replace(QUICK, model=Model(key="sk-ours-123456")))
    with replying(reply) as upstream, proxying(tmp_path, ChatUpstream(upstream, "", config)) as url:
        OpenAI(base_url=f"{url}/v1", api_key="episode-9").chat.completions.create(**WORDS)
    assert seen == ["Bearer sk-ours-123456"]
    assert [call.session_id for call in read_records(tmp_path)] == ["episode-9"]
    assert b"sk-ours" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_local_model_says_the_same_in_process_and_through_the_proxy(tmp_path: Path) -> None:
    """A random model speaks no words and no UTF-8: only its ids can be handed back to it."""
    from harness1.models.transformers_backend import open_transformers
    from tests.tiny_models import save_tiny_model

    chat = hermes()
    size = max(chat.tokenizer.control.values()) + 1
    folder = save_tiny_model(tmp_path / "model", vocab_size=size, max_position_embeddings=16384)
    config = Config(policy=ChatPolicy(temperature=0.8, format_retries=0), env=Env(generation_reserve=24))

    def opened() -> Any:
        return open_transformers(folder, device="cpu", dtype="float32", threads=1, rows=4, cache_tokens=16384)

    expected = episode(LanguageModelPolicy(opened(), chat, 96, config.policy), 5)
    assert expected.status is Status.POLICY_ERROR
    with proxying(tmp_path / "run", upstream_of(opened(), hermes(), config)) as url:
        for client in CLIENTS.values():
            episode(AgentPolicy(client(url), 96), 5)
        small_talk(url)
    calls = list(read_calls(tmp_path / "run"))
    own = expected.turns[0].calls
    for call, alone in zip(calls[:3], own * 3, strict=True):
        prompt = tuple(token for key in alone.prompt for token in expected.segments[key])
        assert (call.prompt_ids, call.output_ids) == (prompt, alone.output_ids)
        assert call.output_logprobs == pytest.approx(alone.output_logprobs, abs=1e-4)
    assert len(calls[3:]) == 4
    assert prefix_merging(calls[3:]).counts["rows"] == 1


def small_talk(url: str) -> None:
    from anthropic import Anthropic

    messages: list[Any] = []
    with Anthropic(base_url=url, api_key="talk") as client:
        for turn in range(4):
            messages.append({"role": "user", "content": f"Number {turn}."})
            made = client.messages.create(model="m", max_tokens=12, messages=messages, extra_body={"seed": turn})
            messages.append({"role": "assistant", "content": made.content})


def test_the_command_says_where_it_is_records_and_ends_on_a_signal(tmp_path: Path) -> None:
    from openai import OpenAI

    done = json.dumps({"choices": [{"message": {"content": "Hi."}, "finish_reason": "stop"}]}).encode()
    with imitating(lambda *_: (200, done)) as upstream:
        words = ("proxy", "--upstream", f"{upstream}/v1", "--record", str(tmp_path / "run"), "--port", "0")
        with command_process(*words) as (process, line):
            url = next(word for word in line.split() if word.startswith(f"http://{HOST}") and word not in words)
            made = OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="e").chat.completions.create(**WORDS)
            assert made.choices[0].message.content == "Hi."
            process.send_signal(signal.SIGTERM)
            _, complaint = process.communicate(timeout=15)
    assert (process.returncode, complaint) == (0, "")
    card = read_stage(tmp_path / "run")
    assert (card.verb, card.status, card.outputs) == ("proxy", "finished", {"calls": 1})


def test_the_command_refuses_in_one_line_what_it_cannot_do(tmp_path: Path) -> None:
    def complaint(*options: str) -> str:
        words = [sys.executable, "-m", "harness1", "serve", "proxy", *options]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    http = ("--upstream", f"http://{HOST}:1/v1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    with socket.create_server((HOST, 0)) as taken:
        busy = str(taken.getsockname()[1])
        assert "cannot listen" in complaint(*http, "--record", str(tmp_path / "a"), "--port", busy)
    nameless = complaint("--upstream", "gpt", "--record", str(tmp_path / "b"))
    assert "names no model" in nameless
    assert "http://HOST:PORT/v1" in nameless
    assert "is not the address" in complaint("--upstream", "http://", "--record", str(tmp_path / "c"))
    assert "is not empty" in complaint(*http, "--record", str(tmp_path / "full"))
    assert "cannot write" in complaint(*http, "--record", str(tmp_path / "file" / "run"))
