"""vLLM itself, in this process and behind a server, with whole weights and with adapters. Without it these tests are
skipped; `make test-vllm` installs its CPU build and runs them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from harness1.config import Lora, load_config
from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.http.model_endpoint import ModelEndpoint
from harness1.models.adapters import adapters_of, add_adapters, list_adapters, write_adapters
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.causal_model import Dtype, load_causal_model
from harness1.models.fetch import find_bundled, get_model
from harness1.models.token_server import VllmServer
from harness1.models.vllm_engine import VllmBackend, open_vllm
from harness1.records import Sampling
from harness1.rl.logprobs import SampledCall, check_start, chosen_logprobs, compare_calls, next_logits
from tests.engines.skyrl_server import wait_until_healthy
from tests.models.test_token_server import write_weights
from tests.support import in_loop, run

WINDOW = 512
LIMITS = {"max_model_len": WINDOW, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
STOP, PARIS = 2, 7042  # <|im_end|>, which ends an output of SmolLM2, and what is the capital
PROMPT = (1, 504, 3575, 282, 4649, 314)  # `<|im_start|>The capital of France is`
PROMPTS = [PROMPT[: 3 + seed % 4] for seed in range(8)]
LONG = PROMPT * 6  # longer than a block of vLLM's cache of prompts
GREEDY = Sampling(temperature=0.0, max_tokens=8, stop_ids=(STOP,))
MANY = [
    Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=12, stop_ids=(STOP,), seed=seed)
    for seed, (temperature, top_p, top_k) in enumerate(
        [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 1.0, 0), (1.5, 1.0, 0), (1.0, 0.9, 0), (0.8, 1.0, 20)]
    )
]
RANK = 4
Engine = VllmBackend | VllmServer


def test_what_is_missing_is_said_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="is not a model"):
        open_vllm(tmp_path)
    write_weights(tmp_path, {"a": (1,)})
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"\[vllm\]"):
        open_vllm(tmp_path)


@contextmanager
def serving(
    folder: Path, options: Mapping[str, str], flags: Sequence[str] = (), settings: Mapping[str, str] | None = None
) -> Iterator[VllmServer]:
    """A vLLM server in a process of its own, with variables of its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every = {"model": str(folder), "served-model-name": "smol", "host": "127.0.0.1", "port": str(port)}
    every |= {"dtype": "float32", "max-model-len": str(WINDOW), "kv-cache-memory-bytes": str(1 << 28)}
    every |= {"logprobs-mode": "processed_logprobs", **options}
    # The CPU build has no metadata under the name that the command `vllm` looks for.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *flags]
    command += [part for name, value in every.items() for part in (f"--{name}", value)]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"} | dict(settings or {})
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}/health")
        yield VllmServer(ModelEndpoint(f"http://127.0.0.1:{port}"), "smol")
    finally:
        process.terminate()
        process.wait(60)


def sampled(backend: Engine, samplings: Sequence[Sampling]) -> list[SampledOutput]:
    """Outputs that are drawn together, of the prompts of their seeds."""

    async def work() -> list[SampledOutput]:
        return await asyncio.gather(*[backend.generate(PROMPTS[each.seed or 0], each) for each in samplings])

    return run(work())


@pytest.fixture(scope="module")
def base() -> Path:
    return get_model(find_bundled("smollm2-135m"))


@pytest.fixture(scope="module")
def changed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights in its last layer."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(base, tmp_path_factory.mktemp("changed"), dirs_exist_ok=True))
    tensors = load_file(base / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for name, value in tensors.items():
        if ".layers.29." in name:
            value += 0.05 * torch.randn(value.shape, generator=noise)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def in_process(base: Path) -> Iterator[VllmBackend]:
    backend = open_vllm(base, dtype="float32", **LIMITS)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[VllmServer]:
    with serving(base, {}) as server:
        yield server


@pytest.fixture(params=["in_process", "server"])
def backend(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


class Adapted(NamedTuple):
    """A way to vLLM with room for adapters, and the type that it computes in."""

    backend: Engine
    dtype: Dtype = "float32"


@pytest.fixture(scope="module", params=["float32", "bfloat16", "server"])
def adapted(request: pytest.FixtureRequest, base: Path) -> Iterator[Adapted]:
    if request.param == "server":
        options = {"max-lora-rank": "8", "max-loras": "2", "max-cpu-loras": "32"}
        with serving(base, options, ["--enable-lora"], {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as server:
            yield Adapted(server)
        return
    backend = open_vllm(base, dtype=request.param, adapter_rank=RANK, **LIMITS)
    yield Adapted(backend, request.param)
    backend.close()


@pytest.fixture(scope="module")
def versions(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four versions of adapters, as training writes them, each with other values."""
    folders = [tmp_path_factory.mktemp("versions") / str(seed) for seed in range(4)]
    for seed, folder in enumerate(folders):
        write_version(folder, base, RANK, seed)
    return folders


def write_version(folder: Path, base: Path, rank: int, seed: int) -> None:
    import torch

    model: Any = load_causal_model(base, "cpu", "float32")
    add_adapters(model, Lora(rank=rank, alpha=float(rank)), seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in list_adapters(model):
            layer.lora_B.weight.copy_(0.05 * torch.randn(layer.lora_B.weight.shape, generator=noise))
    adapters = adapters_of(model)
    assert adapters is not None
    write_adapters(folder, adapters, base)


def passes(engine: Adapted, folder: Path, outputs: list[SampledOutput], prompts: list[tuple[int, ...]]) -> bool:
    """Whether training would start with these outputs and the model in a folder, computed in the sampler's type."""
    model, replayed, recorded = load_causal_model(folder, "cpu", engine.dtype), list[float](), list[float]()
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = next_logits(model, prompt + output.output_ids, len(output.output_ids))
        replayed += chosen_logprobs(logits, output.output_ids, Sampling(temperature=1.0)).tolist()
        recorded += output.output_logprobs
    config = load_config(None, [f"policy.dtype={engine.dtype}", f"train.dtype={engine.dtype}"])
    try:
        found = check_start(replayed, recorded, config)
    except UsageError:
        return False
    print(f"{type(engine.backend).__name__} {engine.dtype}: {len(recorded)} tokens, {found}")
    return True


def begun(backend: Engine, prompt: tuple[int, ...], tokens: int, seed: int) -> asyncio.Task[SampledOutput]:
    return asyncio.create_task(backend.generate(prompt, Sampling(temperature=1.0, max_tokens=tokens, seed=seed)))


@pytest.mark.service
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm")
class TestVllm:
    """All ways to vLLM do the same."""

    def test_recorded_log_probabilities_pass_the_replay_gate(self, backend: Engine, base: Path) -> None:
        outputs = sampled(backend, MANY)
        calls = [
            SampledCall(PROMPTS[how.seed or 0], output.output_ids, output.output_logprobs, how)
            for how, output in zip(MANY, outputs, strict=True)
        ]
        report = compare_calls(load_causal_model(base, "cpu", "float32"), calls)
        assert report.passes("float32"), report

    def test_a_seed_draws_the_same_alone_and_among_others(self, backend: Engine) -> None:
        together = sampled(backend, MANY)
        for at in (1, 2):
            assert sampled(backend, [MANY[at]])[0].output_ids == together[at].output_ids

    def test_a_grammar_masks_what_is_sampled_and_its_log_probabilities(self, backend: Engine) -> None:
        grammar = Grammar('root ::= "yes" | "no"', "yes or no")
        output = run(backend.generate(PROMPT, Sampling(max_tokens=9, stop_ids=(STOP,), seed=1), grammar))
        assert (output.finish_reason, output.output_ids[-1]) == ("stop", STOP)
        assert sum(output.output_logprobs) > -3.0, "two outputs share the whole probability, more or less"

    @in_loop
    async def test_a_cancelled_call_gives_its_place_up(self, backend: Engine) -> None:
        call = begun(backend, PROMPT, WINDOW - 10, 0)
        await asyncio.sleep(0.5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await asyncio.wait_for(backend.generate(PROMPT, GREEDY), 60)).output_ids[0] == PARIS

    def test_other_weights_give_outputs_of_their_version(self, backend: Engine, base: Path, changed: Path) -> None:
        async def work() -> list[SampledOutput]:
            early = asyncio.create_task(backend.generate(PROMPT, msgspec.structs.replace(GREEDY, max_tokens=24)))
            await asyncio.sleep(0.2)
            await backend.load_weights(changed, 1)
            assert early.done()
            late = await backend.generate(PROMPT, GREEDY)
            await backend.load_weights(base, 2)
            return [await early, late, await backend.generate(PROMPT, GREEDY)]

        early, late, again = run(work())
        assert [output.version_end for output in (early, late, again)] == [0, 1, 2]
        assert early.output_ids[:8] == again.output_ids != late.output_ids

    def test_a_folder_without_weights_is_refused_and_the_old_ones_stay(self, backend: Engine, tmp_path: Path) -> None:
        with pytest.raises(UsageError):
            run(backend.load_weights(tmp_path, 9))
        assert run(backend.generate(PROMPT, GREEDY)).output_ids[0] == PARIS

    def test_a_server_with_raw_log_probabilities_is_found_out(self, base: Path) -> None:
        with serving(base, {"logprobs-mode": "raw_logprobs"}) as raw:
            with pytest.raises(UsageError, match="--logprobs-mode processed_logprobs"):
                run(raw.generate(PROMPT, MANY[2]))
            assert len(run(raw.generate(PROMPT, MANY[1])).output_ids) >= 1

    @in_loop
    async def test_a_closed_engine_is_a_fault(self, in_process: VllmBackend) -> None:
        call = begun(in_process, PROMPT, WINDOW - 10, 0)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(in_process.close)
        for ended in (call, in_process.generate(PROMPT, GREEDY)):
            with pytest.raises(InfrastructureFault, match="closed"):
                await ended

    def test_adapters_are_sampled_as_the_trainer_computes_them_and_stay_if_there_is_no_room_for_others(
        self, adapted: Adapted, base: Path, versions: list[Path], tmp_path: Path
    ) -> None:
        run(adapted.backend.load_weights(versions[0], 1))
        write_version(tmp_path / "wide", base, rank=16, seed=0)
        for wide in (False, True):
            if wide:
                with pytest.raises((UsageError, InfrastructureFault)):
                    run(adapted.backend.load_weights(tmp_path / "wide", 2))
            outputs = sampled(adapted.backend, [Sampling(max_tokens=24, seed=seed) for seed in range(8)])
            assert {output.version_end for output in outputs} == {1}
            assert passes(adapted, versions[0], outputs, PROMPTS)
        assert not passes(adapted, versions[1], outputs, PROMPTS)
        assert not passes(adapted, base, outputs, PROMPTS)

    def test_calls_in_flight_end_on_the_version_they_began_with(self, adapted: Adapted, versions: list[Path]) -> None:
        """Also when there is room for two versions, three follow, and the folder of the first is gone."""
        copies = [Path(shutil.copytree(each, each.parent / f"copy-{each.name}")) for each in versions]

        async def work() -> list[SampledOutput]:
            await adapted.backend.load_weights(copies[0], 1)
            calls = [begun(adapted.backend, LONG, WINDOW // 2, seed=0)]
            for version, folder in enumerate(copies[1:], 2):
                await asyncio.sleep(0.5)
                await adapted.backend.load_weights(folder, version)
                calls.append(begun(adapted.backend, LONG, 12, seed=version))
                shutil.rmtree(copies[version - 2])
            assert not calls[0].done()
            return await asyncio.gather(*calls)

        outputs = run(work())
        shutil.rmtree(copies[-1])
        assert [output.version_end for output in outputs] == [1, 2, 3, 4]
        for folder, output in zip(versions, outputs, strict=True):
            assert passes(adapted, folder, [output], [LONG])
        assert not passes(adapted, versions[1], outputs[:1], [LONG])
