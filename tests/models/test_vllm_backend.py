"""vLLM itself, in this process and behind a server. Without it these tests are skipped; `make test-vllm` installs its
CPU build and runs them."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.http.model_endpoint import ModelEndpoint
from harness1.models.backend import Backend, Grammar, SampledOutput
from harness1.models.causal_model import load_causal_model
from harness1.models.fetch import find_bundled, get_model
from harness1.models.model_servers import VllmServer
from harness1.models.vllm_engine import VllmBackend, open_vllm
from harness1.records import Sampling
from harness1.rl.logprobs import SampledCall, compare_calls
from tests.models.test_token_server import write_weights
from tests.models.vllm_engines import PROMPT, STOP, WINDOW, needs_vllm, prompt_of, sampled_together, serving
from tests.support import run

PARIS = 7042
GREEDY = Sampling(temperature=0.0, max_tokens=8, stop_ids=(STOP,))
YES_OR_NO = Grammar('root ::= "yes" | "no"', "yes or no")
MANY = tuple(
    Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=12, stop_ids=(STOP,), seed=seed)
    for seed, (temperature, top_p, top_k) in enumerate(
        [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 1.0, 0), (1.5, 1.0, 0), (1.0, 0.9, 0), (0.8, 1.0, 20)]
    )
)


def test_without_vllm_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path, {"a": (1,)})
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"\[vllm\]"):
        open_vllm(tmp_path)


def test_a_folder_without_weights_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a model"):
        open_vllm(tmp_path)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return get_model(find_bundled("smollm2-135m"))


@pytest.fixture(scope="module")
def changed(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights in its last layer."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(smollm2, folder, dirs_exist_ok=True)
    tensors = load_file(smollm2 / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for name, value in tensors.items():
        if ".layers.29." in name:
            value += 0.05 * torch.randn(value.shape, generator=noise)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def in_process(smollm2: Path) -> Iterator[VllmBackend]:
    backend = open_vllm(
        smollm2, dtype="float32", max_model_len=WINDOW, enforce_eager=True, kv_cache_memory_bytes=1 << 28
    )
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[VllmServer]:
    with serving(smollm2, {}) as url:
        yield VllmServer(ModelEndpoint(url), "smol")


@pytest.fixture(params=["in_process", "server"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(request.param)


class TestVllm:
    """Both ways to vLLM do the same."""

    pytestmark = needs_vllm

    def test_recorded_log_probabilities_pass_the_replay_gate(self, backend: Backend, smollm2: Path) -> None:
        outputs = sampled_together(backend, MANY)
        assert all(len(output.output_logprobs) == len(output.output_ids) >= 1 for output in outputs)
        report = compare_calls(load_causal_model(smollm2, "cpu", "float32"), calls_of(outputs))
        assert report.passes("float32"), report

    def test_a_seed_draws_the_same_alone_and_among_others(self, backend: Backend) -> None:
        together = sampled_together(backend, MANY)
        assert [sampled_together(backend, [sampling])[0].output_ids for sampling in MANY[1:3]] == [
            output.output_ids for output in together[1:3]
        ]

    def test_a_grammar_masks_what_is_sampled_and_its_log_probabilities(self, backend: Backend) -> None:
        sampling = Sampling(max_tokens=9, stop_ids=(STOP,), seed=1)
        output = run(backend.generate(PROMPT, sampling, YES_OR_NO))
        assert output.finish_reason == "stop"
        assert output.output_ids[-1] == STOP
        assert sum(output.output_logprobs) > -3.0, "two outputs share the whole probability, more or less"

    def test_a_cancelled_call_gives_its_place_up(self, backend: Backend) -> None:
        async def work() -> None:
            call = asyncio.create_task(backend.generate(PROMPT, Sampling(max_tokens=WINDOW - 10)))
            await asyncio.sleep(0.5)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await asyncio.wait_for(backend.generate(PROMPT, GREEDY), 60)).output_ids[0] == PARIS

        run(work())

    def test_other_weights_give_other_outputs_of_their_version(
        self, backend: Backend, smollm2: Path, changed: Path
    ) -> None:
        async def work() -> list[SampledOutput]:
            early = asyncio.create_task(backend.generate(PROMPT, msgspec.structs.replace(GREEDY, max_tokens=24)))
            await asyncio.sleep(0.2)
            await backend.load_weights(changed, 1)
            assert early.done()
            late = await backend.generate(PROMPT, GREEDY)
            await backend.load_weights(smollm2, 2)
            return [await early, late, await backend.generate(PROMPT, GREEDY)]

        early, late, again = run(work())
        assert [output.version_end for output in (early, late, again)] == [0, 1, 2]
        assert early.output_ids[:8] == again.output_ids != late.output_ids

    def test_weights_of_another_model_are_refused_and_the_old_ones_stay(self, backend: Backend, tmp_path: Path) -> None:
        if isinstance(backend, VllmBackend):
            write_weights(tmp_path, {"model.embed_tokens.weight": (4, 4)})
        with pytest.raises(UsageError):
            run(backend.load_weights(tmp_path, 9))
        assert run(backend.generate(PROMPT, GREEDY)).output_ids[0] == PARIS


class TestVllmAtItsEdges:
    pytestmark = needs_vllm

    def test_a_server_with_raw_log_probabilities_is_found_out(self, smollm2: Path) -> None:
        with serving(smollm2, {"logprobs-mode": "raw_logprobs"}) as url:
            raw = VllmServer(ModelEndpoint(url), "smol")
            with pytest.raises(UsageError, match="--logprobs-mode processed_logprobs"):
                run(raw.generate(PROMPT, MANY[2]))
            assert len(run(raw.generate(PROMPT, MANY[1])).output_ids) >= 1

    def test_a_closed_engine_is_a_fault(self, in_process: VllmBackend) -> None:
        async def work() -> None:
            call = asyncio.create_task(in_process.generate(PROMPT, Sampling(max_tokens=WINDOW - 10)))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(in_process.close)
            for ended in (call, in_process.generate(PROMPT, GREEDY)):
                with pytest.raises(InfrastructureFault, match="closed"):
                    await ended

        run(work())


def calls_of(outputs: Sequence[SampledOutput]) -> list[SampledCall]:
    """The outputs of `MANY`, or of its second alone, as records."""
    samplings = MANY if len(outputs) == len(MANY) else MANY[1:2]
    return [
        SampledCall(prompt_of(sampling.seed or 0), output.output_ids, output.output_logprobs, sampling)
        for sampling, output in zip(samplings, outputs, strict=True)
    ]
