"""Calls share the weights; a change has them alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from harness1.errors import InfrastructureFault, Refusal, Unreachable, UsageError
from harness1.models.token_server import WeightGate
from tests.models.test_adapters import save_adapters
from tests.models.test_token_server import (
    PROMPT,
    SAMPLING,
    by_vllm,
    completion,
    generated,
    sample,
    sglang,
    vllm,
    write_weights,
)
from tests.support import in_loop, run
from tests.tiny_models import save_tiny_model


class Uses:
    """Tasks that use or change weights until they are let go, and the order in which they began and ended."""

    def __init__(self) -> None:
        self.gate, self.order = WeightGate(), list[str]()
        self.free = asyncio.Event()

    async def call(self, name: str) -> None:
        async with self.gate.call():
            self.order.append(name)
            await self.free.wait()
            self.order.append(f"/{name}")

    async def change(self, version: int) -> None:
        async with self.gate.change(version):
            self.order.append(f"v{version}")
            await asyncio.sleep(0)
            self.order.append(f"/v{version}")


@in_loop
async def test_a_change_waits_for_the_calls_in_flight_and_later_calls_for_the_change() -> None:
    uses = Uses()
    tasks = [asyncio.create_task(each) for each in (uses.call("a"), uses.call("b"), uses.change(1), uses.call("c"))]
    await asyncio.sleep(0.01)
    assert uses.order == ["a", "b"]
    uses.free.set()
    await asyncio.gather(*tasks)
    assert uses.order == ["a", "b", "/a", "/b", "v1", "/v1", "c", "/c"]
    assert uses.gate.version == 1


@in_loop
async def test_changes_come_one_after_another() -> None:
    uses = Uses()
    await asyncio.gather(uses.change(1), uses.change(2), uses.change(3))
    assert uses.order == ["v1", "/v1", "v2", "/v2", "v3", "/v3"]


@pytest.mark.parametrize("cancelled", ["call", "change"])
@in_loop
async def test_a_call_or_a_change_that_is_cancelled_gives_its_place_up(cancelled: str) -> None:
    uses = Uses()
    tasks = {"call": asyncio.create_task(uses.call("a")), "change": asyncio.create_task(uses.change(1))}
    await asyncio.sleep(0.01)
    tasks.pop(cancelled).cancel()
    uses.free.set()
    await asyncio.wait_for(asyncio.gather(*tasks.values(), uses.call("b")), 5)
    assert uses.gate.version == (cancelled == "call")
    assert "/b" in uses.order


@pytest.mark.parametrize(("error", "usable"), [(UsageError("no such folder"), True), (OSError("disk"), False)])
def test_only_a_refused_change_leaves_the_old_weights_in_use(error: Exception, usable: bool) -> None:
    gate = WeightGate()

    async def work() -> None:
        with pytest.raises(type(error)):
            async with gate.change(1):
                raise error
        assert gate.version == 0
        if usable:
            async with gate.call():
                return
        with pytest.raises(InfrastructureFault):
            async with gate.call():
                pass
        async with gate.change(2):
            pass
        async with gate.call():
            assert gate.version == 2

    run(work())


def test_a_gate_serves_one_event_loop_after_another() -> None:
    uses = Uses()

    async def work(version: int) -> None:
        uses.free = asyncio.Event()
        call = asyncio.create_task(uses.call("a"))
        await asyncio.sleep(0)
        change, late = asyncio.create_task(uses.change(version)), asyncio.create_task(uses.call("b"))
        await asyncio.sleep(0)
        uses.free.set()
        await asyncio.gather(call, change, late)

    for version in (1, 2):
        run(work(version))
    assert uses.gate.version == 2


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("adapters")
    save_adapters(home / "adapters", save_tiny_model(home / "base"))
    return home / "adapters"


def by_sglang(path: str, body: dict[str, Any]) -> object:
    return generated() if path == "/generate" else {"success": True, "loaded_adapters": {}}


def test_vllm_loads_each_version_under_its_own_name_and_new_calls_use_it(adapters: Path) -> None:
    server, endpoint = vllm(by_vllm)
    run(server.load_weights(adapters, 3))
    path, body = endpoint.asked[0]
    assert path == "/v1/load_lora_adapter"
    assert body == {"lora_name": body["lora_name"], "lora_path": str(adapters), "load_inplace": False}
    assert body["lora_name"].startswith("harness1-3-")
    assert sample(server).version_end == server.version == 3
    assert endpoint.asked[1][1]["model"] == body["lora_name"]
    run(server.load_weights(adapters, 4))
    assert sample(server).version_end == 4
    assert endpoint.asked[-1][1]["model"].startswith("harness1-4-")


@in_loop
async def test_calls_in_flight_end_on_their_version_which_is_unloaded_when_no_call_uses_it(adapters: Path) -> None:
    server, endpoint = vllm(by_vllm)

    def unloaded() -> list[str]:
        return [body["lora_name"][:10] for path, body in endpoint.asked if path == "/v1/unload_lora_adapter"]

    await server.load_weights(adapters, 1)
    held = endpoint.gate = asyncio.Event()
    early = asyncio.create_task(server.generate(PROMPT, SAMPLING))
    await asyncio.sleep(0.01)
    endpoint.gate = asyncio.Event()
    endpoint.gate.set()
    for version in (2, 3, 4):
        await server.load_weights(adapters, version)
    assert unloaded() == ["harness1-2"], "1 is in use; 3 and 4 are the newest"
    held.set()
    assert (await early).version_end == 1
    await server.load_weights(adapters, 5)
    assert unloaded() == ["harness1-2", "harness1-1", "harness1-3"]


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (Unreachable("404 Not Found", 404), UsageError, r"UPDATING=1, --enable-lora, --max-lora-rank"),
        (Refusal("400 rank too large"), UsageError, "--enable-lora"),
        (InfrastructureFault("500 LoRA is not enabled"), InfrastructureFault, "--enable-lora"),
        (Unreachable("Cannot connect (3 attempts)"), Unreachable, r"^Cannot connect \(3 attempts\)$"),
    ],
)
def test_a_vllm_that_does_not_load_adapters_says_what_to_do(
    adapters: Path, error: Exception, raised: type[Exception], says: str
) -> None:
    server, _ = vllm(lambda path, body: error if "lora" in path else completion())
    with pytest.raises(raised, match=says):
        run(server.load_weights(adapters, 1))
    assert sample(server).version_end == 0


def test_an_adapter_that_an_unanswered_try_has_loaded_is_used(adapters: Path) -> None:
    server, _ = vllm(lambda path, body: Refusal("has already been loaded") if "lora" in path else completion())
    run(server.load_weights(adapters, 2))
    assert sample(server).version_end == 2


def test_whole_weights_take_the_place_of_adapters(adapters: Path, tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": (2,)})
    server, endpoint = vllm(lambda path, body: completion() if path == "/v1/completions" else {})
    run(server.load_weights(adapters, 1))
    run(server.load_weights(tmp_path, 2))
    assert sample(server).version_end == 2
    assert endpoint.asked[-1][1]["model"] == "smol"


def test_sglang_names_the_adapter_in_each_request(adapters: Path) -> None:
    server, endpoint = sglang(by_sglang)
    run(server.load_weights(adapters, 3))
    path, body = endpoint.asked[0]
    assert (path, body["lora_path"]) == ("/load_lora_adapter", str(adapters))
    assert sample(server).version_end == 3
    assert endpoint.asked[-1][1]["lora_path"] == body["lora_name"]
    refusing, _ = sglang(lambda path, body: {"success": False, "error_message": "rank"})
    with pytest.raises(InfrastructureFault, match=r"rank.*--enable-lora"):
        run(refusing.load_weights(adapters, 3))
