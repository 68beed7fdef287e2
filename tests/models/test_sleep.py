"""vLLM sleeps while a trainer uses its GPUs: calls end before, wait meanwhile, and go on after."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness1.errors import Unreachable, UsageError
from harness1.models.backend import Sleeper
from harness1.models.model_servers import VllmServer
from harness1.models.transformers_backend import TransformersBackend
from tests.models.test_token_server import PROMPT, SAMPLING, completion, sample, sglang, vllm
from tests.support import run

SLEEP, WAKE = "/sleep?level=1&mode=wait", "/wake_up"


def by_vllm(path: str, body: dict[str, Any]) -> object:
    return completion() if path == "/v1/completions" else ""


def test_calls_in_flight_end_first_and_calls_that_come_meanwhile_wait() -> None:
    server, endpoint = vllm(by_vllm)

    async def work() -> None:
        held = endpoint.gate = asyncio.Event()
        early = asyncio.create_task(server.generate(PROMPT, SAMPLING))
        await asyncio.sleep(0.01)
        asking = asyncio.create_task(asleep_until(server, woken := asyncio.Event()))
        await asyncio.sleep(0.01)
        assert endpoint.paths == ["/v1/completions"]
        held.set()
        await early
        late = asyncio.create_task(server.generate(PROMPT, SAMPLING))
        await asyncio.sleep(0.01)
        assert endpoint.paths == ["/v1/completions", SLEEP]
        woken.set()
        assert (await late).version_end == 0
        await asking

    run(work())
    assert endpoint.paths == ["/v1/completions", SLEEP, WAKE, "/v1/completions"]


def test_a_server_is_awake_after_an_error_of_the_trainer() -> None:
    server, endpoint = vllm(by_vllm)

    async def work() -> None:
        async with server.asleep():
            raise UsageError("the loss is not finite")

    with pytest.raises(UsageError, match="not finite"):
        run(work())
    assert endpoint.paths == [SLEEP, WAKE]
    assert sample(server).version_end == 0


def test_a_server_that_was_not_started_to_sleep_is_refused_with_what_to_do() -> None:
    server, endpoint = vllm(
        lambda path, body: Unreachable("404 Not Found", 404) if path == SLEEP else by_vllm(path, body)
    )
    with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"):
        run(asleep_until(server, None))
    assert endpoint.paths == [SLEEP]
    assert sample(server).version_end == 0


def test_only_vllm_can_sleep() -> None:
    assert isinstance(vllm(by_vllm)[0], Sleeper)
    assert not isinstance(sglang(by_vllm)[0], Sleeper)
    assert not issubclass(TransformersBackend, Sleeper)


async def asleep_until(server: VllmServer, woken: asyncio.Event | None) -> None:
    async with server.asleep():
        if woken is not None:
            await woken.wait()
