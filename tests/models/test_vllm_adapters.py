"""Adapters on vLLM itself: it samples from what the trainer computes, version by version. Skipped without vLLM;
`make test-vllm` installs its CPU build and runs them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness1.config import Lora, load_config
from harness1.errors import InfrastructureFault, UsageError
from harness1.http.model_endpoint import ModelEndpoint
from harness1.models.adapters import adapters_of, add_adapters, list_adapters, write_adapters
from harness1.models.backend import Backend, SampledOutput
from harness1.models.causal_model import Dtype, load_causal_model
from harness1.models.fetch import find_bundled, get_model
from harness1.models.model_servers import VllmServer
from harness1.models.vllm_engine import VllmBackend, open_vllm
from harness1.records import Sampling
from harness1.rl.logprobs import check_start, chosen_logprobs, next_logits
from tests.models.vllm_engines import PROMPT, WINDOW, needs_vllm, prompt_of, serving
from tests.support import run

pytestmark = needs_vllm
RANK = 4
PROMPTS = [prompt_of(seed) for seed in range(8)]
LONG = PROMPT * 6
"""Longer than a block of vLLM's cache of prompts."""


@pytest.fixture(scope="module")
def base() -> Path:
    return get_model(find_bundled("smollm2-135m"))


@pytest.fixture(scope="module")
def versions(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four versions of adapters, as training writes them, each with other values."""
    home = tmp_path_factory.mktemp("versions")
    for seed in range(4):
        write_version(home / str(seed), base, RANK, seed)
    return [home / str(seed) for seed in range(4)]


def write_version(folder: Path, base: Path, rank: int, seed: int) -> None:
    """Write new adapters, the matrices B of which have values of their own in place of zeros."""
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


@dataclass(frozen=True)
class Engine:
    """A way to vLLM, and the type that it computes in."""

    backend: VllmBackend | VllmServer
    dtype: Dtype = "float32"


@pytest.fixture(scope="module", params=["float32", "bfloat16", "server"])
def engine(request: pytest.FixtureRequest, base: Path) -> Iterator[Engine]:
    """vLLM in this process, by its type, and behind a server."""
    if request.param == "server":
        options = {"max-lora-rank": "8", "max-loras": "2", "max-cpu-loras": "32"}
        with serving(base, options, ["--enable-lora"], {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as url:
            yield Engine(VllmServer(ModelEndpoint(url), "smol"))
        return
    limits = {"max_model_len": WINDOW, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    backend = open_vllm(base, dtype=request.param, adapter_rank=RANK, **limits)
    yield Engine(backend, request.param)
    backend.close()


def test_adapters_are_sampled_as_the_trainer_computes_them(engine: Engine, base: Path, versions: list[Path]) -> None:
    run(engine.backend.load_adapter(versions[0], 1))
    outputs = sampled(engine.backend)
    assert {output.version_end for output in outputs} == {1}
    assert passes(engine, versions[0], outputs, PROMPTS)
    assert not passes(engine, versions[1], outputs, PROMPTS)
    assert not passes(engine, base, outputs, PROMPTS)


def test_calls_in_flight_end_on_the_version_that_they_began_with(engine: Engine, versions: list[Path]) -> None:
    """Also when there is room for two versions, three follow, and the folder of the first is gone."""

    async def work(folders: list[Path]) -> list[SampledOutput]:
        await engine.backend.load_adapter(folders[0], 1)
        calls = [begun(engine.backend, LONG, WINDOW // 2, seed=0)]
        for version, folder in enumerate(folders[1:], 2):
            await asyncio.sleep(0.5)
            await engine.backend.load_adapter(folder, version)
            calls.append(begun(engine.backend, LONG, 12, seed=version))
            shutil.rmtree(folders[version - 2])
        assert not calls[0].done()
        return await asyncio.gather(*calls)

    copies = [Path(shutil.copytree(each, each.parent / f"copy-{each.name}")) for each in versions]
    outputs = run(work(copies))
    shutil.rmtree(copies[-1])
    assert [output.version_end for output in outputs] == [1, 2, 3, 4]
    for folder, output in zip(versions, outputs, strict=True):
        assert passes(engine, folder, [output], [LONG])
    assert not passes(engine, versions[1], outputs[:1], [LONG])


def test_adapters_that_an_engine_has_no_room_for_are_refused_and_the_present_ones_stay(
    engine: Engine, base: Path, versions: list[Path], tmp_path: Path
) -> None:
    run(engine.backend.load_adapter(versions[0], 1))
    write_version(tmp_path, base, rank=16, seed=0)
    with pytest.raises((UsageError, InfrastructureFault)):
        run(engine.backend.load_adapter(tmp_path, 2))
    outputs = sampled(engine.backend)
    assert {output.version_end for output in outputs} == {1}
    assert passes(engine, versions[0], outputs, PROMPTS)


def begun(backend: Backend, prompt: tuple[int, ...], tokens: int, seed: int) -> asyncio.Task[SampledOutput]:
    """A call that ends at a number of tokens."""
    return asyncio.create_task(backend.generate(prompt, Sampling(temperature=1.0, max_tokens=tokens, seed=seed)))


def sampled(backend: Backend) -> list[SampledOutput]:
    """Eight outputs of 24 tokens, drawn together as the episodes of a batch are."""

    async def work() -> list[SampledOutput]:
        return await asyncio.gather(*[begun(backend, prompt, 24, seed) for seed, prompt in enumerate(PROMPTS)])

    return run(work())


def passes(engine: Engine, folder: Path, outputs: list[SampledOutput], prompts: list[tuple[int, ...]]) -> bool:
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
