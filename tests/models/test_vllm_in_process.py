"""Adapters on vLLM in this process, over an engine that records what it is asked: a name and a number for each version,
calls end on the version that they began with, and what no call uses is removed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness1.errors import InfrastructureFault, UsageError
from harness1.models.token_server import WeightGate
from harness1.models.vllm_engine import LoopThread, VllmBackend
from harness1.records import Sampling
from tests.models.test_adapters import save_adapters
from tests.support import in_loop, run
from tests.tiny_models import save_tiny_model

SAMPLING = Sampling(max_tokens=4, stop_ids=(2,), seed=11)


class FakeEngine:
    """What `VllmBackend` uses of vLLM's engine. A call waits for the event that `gate` was when it began."""

    model_config = SimpleNamespace(max_model_len=64)

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.removed: list[int] = []
        self.sampled_with: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.asleep: tuple[int, str] | None = None

    async def add_lora(self, request: Any) -> bool:
        if self.fault is not None:
            raise self.fault
        self.added.append(request)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.removed.append(number)
        return True

    async def generate(self, prompt: Any, params: Any, number: str, lora_request: Any) -> AsyncIterator[Any]:
        self.sampled_with.append(lora_request)
        await self.gate.wait()
        chosen = SimpleNamespace(logprob=-0.5)
        output = SimpleNamespace(
            token_ids=[7, 2], logprobs=[{7: chosen}, {2: chosen}], finish_reason="stop", stop_reason=2
        )
        yield SimpleNamespace(outputs=[output])

    async def sleep(self, level: int, mode: str) -> None:
        self.asleep = (level, mode)

    async def wake_up(self) -> None:
        self.asleep = None

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `vllm` with what is imported from it."""

    def record(*values: Any, **fields: Any) -> SimpleNamespace:
        names = dict(zip(("lora_name", "lora_int_id", "lora_path"), values, strict=False))
        return SimpleNamespace(**names, **fields)

    error = type("VLLMError", (Exception,), {})
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": record},
        "vllm.exceptions": {"VLLMError": error, "VLLMClientError": type("VLLMClientError", (error,), {})},
        "vllm.inputs": {"tokens_input": list},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": record},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2), "StructuredOutputsParams": record},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters beside that of their base."""
    home = tmp_path_factory.mktemp("adapters")
    save_adapters(home / "adapters", save_tiny_model(home / "base"))
    return home / "adapters"


@pytest.fixture
def backend(adapters: Path) -> Iterator[VllmBackend]:
    made = VllmBackend(FakeEngine(), LoopThread(), {}, "name", adapters.with_name("base"), WeightGate())
    yield made
    made.close()


def test_each_version_has_its_name_and_number_and_calls_use_the_newest(backend: VllmBackend, adapters: Path) -> None:
    engine: Any = backend._engine
    assert run(backend.generate((1, 5), SAMPLING)).version_end == 0
    for version in (3, 4, 4):
        run(backend.load_weights(adapters, version))
        assert run(backend.generate((1, 5), SAMPLING)).version_end == backend.version == version
    assert [request.lora_path for request in engine.added] == [str(adapters)] * 3
    assert [request.lora_int_id for request in engine.added] == [1, 2, 2], "the same version keeps its number"
    assert [request.lora_name[:11] for request in engine.added] == ["harness1-3-", "harness1-4-", "harness1-4-"]
    assert engine.sampled_with == [None, *engine.added]
    assert engine.removed == [1]


@in_loop
async def test_a_version_is_removed_when_it_is_old_and_no_call_uses_it(backend: VllmBackend, adapters: Path) -> None:
    engine: Any = backend._engine
    await backend.load_weights(adapters, 1)
    held = engine.gate = asyncio.Event()
    early = asyncio.create_task(backend.generate((1, 5), SAMPLING))
    while not engine.sampled_with:
        await asyncio.sleep(0.001)
    engine.gate = asyncio.Event()
    engine.gate.set()
    for version in (2, 3):
        await backend.load_weights(adapters, version)
    assert engine.removed == [2], "1 is in use, and 3 is the newest"
    backend._loop._loop.call_soon_threadsafe(held.set)
    assert (await early).version_end == engine.sampled_with[0].lora_int_id == 1
    await backend.load_weights(adapters, 4)
    assert sorted(engine.removed) == [1, 2, 3]


def test_an_adapter_that_does_not_load_leaves_the_present_one_in_use(backend: VllmBackend, adapters: Path) -> None:
    engine: Any = backend._engine
    run(backend.load_weights(adapters, 1))
    engine.fault = Exception("Call to add_lora method failed: LoRA rank 16 is greater than max_lora_rank 8")
    with pytest.raises(InfrastructureFault, match="max_lora_rank"):
        run(backend.load_weights(adapters, 2))
    assert run(backend.generate((1, 5), SAMPLING)).version_end == 1
    assert engine.removed == []


@in_loop
async def test_an_engine_sleeps_and_calls_wait_for_its_end(backend: VllmBackend) -> None:
    engine: Any = backend._engine
    async with backend.asleep():
        assert engine.asleep == (1, "wait")
        call = asyncio.create_task(backend.generate((1, 5), SAMPLING))
        await asyncio.sleep(0.05)
        assert engine.sampled_with == []
    assert engine.asleep is None
    assert (await call).version_end == 0


def test_an_engine_that_cannot_sleep_goes_on(backend: VllmBackend) -> None:
    engine: Any = backend._engine

    async def refused(level: int, mode: str) -> None:
        raise Exception("sleep mode is not enabled")

    async def work() -> None:
        with pytest.raises(InfrastructureFault, match="sleep mode is not enabled"):
            async with backend.asleep():
                raise AssertionError("it does not sleep")

    engine.sleep = refused
    run(work())


def test_adapters_of_another_base_are_not_given_to_the_engine(backend: VllmBackend, tmp_path: Path) -> None:
    engine: Any = backend._engine
    save_adapters(tmp_path / "adapters", save_tiny_model(tmp_path / "base", seed=1))
    with pytest.raises(UsageError):
        run(backend.load_weights(tmp_path / "adapters", 1))
    assert engine.added == []


def test_an_engine_whose_closing_was_interrupted_is_closed_by_the_next(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = backend._loop._loop
    close = loop.close

    def interrupted() -> None:
        close()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.close()
    backend.close()
    assert not hasattr(backend, "_engine")
