"""vLLM: servers that take token ids, and the engine, which has its own subprocesses and batches concurrent calls."""

from __future__ import annotations

import atexit
import gc
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.errors import InfrastructureFault, MissingExtra, Refusal, UsageError
from harness1.hashing import digest
from harness1.model_folder import check_base, checked_base, folder_hash, holds_adapters
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.files.weight_shapes import Shapes, check_same_shapes, weight_shapes
from harness1.models.sampled import EngineOutput, checked
from harness1.models.servers.adapter_versions import AdapterVersions, LoadedAdapter
from harness1.models.servers.loop_thread import LoopThread
from harness1.models.servers.token_server import TokenServer
from harness1.models.transformers.adapter_files import read_adapter_config
from harness1.models.transformers.causal_model import Dtype
from harness1.models.weight_gate import WeightGate
from harness1.records import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


COLDEST = 0.01
"""Lowest temperature above 0; vLLM silently raises lower ones to it."""


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM 0.31 makes room for (`MaxLoRARanks`)."""
ADAPTERS = 2
"""Adapters in use at once: the newest, and the one that calls in flight end with."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class VllmServer(TokenServer):
    """A vLLM server. A grammar masks both sampling and log probabilities."""

    raw_advice = "start vLLM with --logprobs-mode processed_logprobs"
    adapter_advice = (
        "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank of at least train.lora.rank"
        " and --max-loras of rl.staleness + 2"
    )

    def _check(self, sampling: Sampling) -> None:
        check_temperature(sampling)

    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None, adapter: str | None
    ) -> EngineOutput:
        body: dict[str, Any] = self._body(prompt_ids, sampling.temperature) | {
            "model": adapter or self.model,
            "max_tokens": sampling.max_tokens,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop_token_ids": sampling.stop_ids,
            "logprobs": 0,
            "return_token_ids": True,
        }
        if grammar is not None:
            body["structured_outputs"] = {"grammar": grammar.ebnf}
        choice = await self._ask(body)
        if choice.prompt_token_ids != list(prompt_ids):
            raise InfrastructureFault(f"{self._endpoint.url} returned no prompt ids, or not those it was sent")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else None
        return EngineOutput(choice.token_ids, logprobs, choice.finish_reason, choice.stop_reason)

    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float) -> float:
        choice = await self._ask(self._body(prompt_ids, temperature) | {"max_tokens": 1, "logprobs": 1})
        top = choice.logprobs.top_logprobs if choice.logprobs else None
        if not top or not top[0]:
            raise InfrastructureFault(f"{self._endpoint.url} returned no log probabilities")
        return max(top[0].values())

    async def _load(self, folder: Path, version: int) -> None:
        """Load weights after all clients' calls; the prefix cache is dropped with the old ones. A pause request that
        got no answer may have taken effect, so the pause is always ended."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            try:
                await self._endpoint.post("/pause?mode=wait", {}, msgspec.Raw)
                await self._endpoint.post("/collective_rpc", reload, msgspec.Raw)
            finally:
                await self._endpoint.post("/resume", {}, msgspec.Raw)
        except UsageError as error:
            raise UsageError(f"{error}; to load weights, start vLLM with VLLM_SERVER_DEV_MODE=1") from error

    async def _load_adapter(self, adapter: LoadedAdapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder), "load_inplace": False}
        try:
            await self._endpoint.post("/v1/load_lora_adapter", body, bytes)
        except Refusal as error:
            if "already" not in str(error):  # a try that got no answer has loaded it
                raise

    async def _unload_adapter(self, name: str) -> None:
        await self._endpoint.post("/v1/unload_lora_adapter", {"lora_name": name}, bytes)

    def _body(self, prompt_ids: Sequence[int], temperature: float) -> dict[str, Any]:
        """Return the fields of every request: penalties override the model's own defaults, and with `ignore_eos` only
        the given stop tokens end an output."""
        return {
            "model": self.model,
            "prompt": tuple(prompt_ids),
            "temperature": temperature,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
        }

    async def _ask(self, body: dict[str, Any]) -> _Choice:
        choices = (await self._endpoint.post("/v1/completions", body, _Completion)).choices
        if len(choices) != 1:
            raise InfrastructureFault(f"{self._endpoint.url} returned {len(choices)} outputs instead of one")
        return choices[0]


def check_temperature(sampling: Sampling) -> None:
    """Raise UsageError for a temperature that vLLM would replace: one between 0 and 0.01."""
    if 0.0 < sampling.temperature < COLDEST:
        raise UsageError(f"vLLM cannot sample at temperature {sampling.temperature}: use 0, or at least {COLDEST}")


def open_vllm(
    folder: Path,
    *,
    dtype: Dtype = "bfloat16",
    seed: int = 0,
    max_model_len: int | None = None,
    memory_share: float = 0.85,
    adapter_rank: int = 0,
    **options: Any,
) -> VllmBackend:
    """Start vLLM on a model.

    Args:
        folder: model folder as transformers' `save_pretrained` writes it, or one of adapters.
        dtype: type of computation, except for the output head, which is always float32.
        seed: seed of calls without their own.
        max_model_len: tokens of prompt and output together; None for the model's maximum.
        memory_share: share of a GPU for weights and cache.
        adapter_rank: rank of the adapters that will be loaded; 0 for none but those of `folder`.
        options: further fields of `vllm.AsyncEngineArgs`, such as `enforce_eager` or `kv_cache_memory_bytes`.

    Raises:
        UsageError: the folder does not hold such a model, or vLLM does not start with the options.
        MissingExtra: vLLM is not installed.
    """
    base, adapters = checked_base(folder), AdapterVersions(1)
    shapes, first = weight_shapes(base), None
    fields: dict[str, Any] = {
        "model": str(base.resolve()),
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": memory_share,
        "hf_overrides": {"head_dtype": "float32"},
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if holds_adapters(folder):
        first = adapters.named(folder.resolve(), 0)
        adapter_rank = max(adapter_rank, read_adapter_config(folder).r)
    if adapter_rank:
        fields |= {"enable_lora": True, "max_lora_rank": _rank_of_vllm(adapter_rank), "max_loras": ADAPTERS}
    loop = LoopThread()
    try:
        engine = loop.call(_start(fields | options))
    except UsageError:
        loop.stop()
        raise
    backend = VllmBackend(engine, loop, shapes, digest(["vllm", folder_hash(folder), dtype]), base, adapters)
    if first is not None:
        loop.call(backend.add_adapter(first))
    return backend


def _rank_of_vllm(rank: int) -> int:
    """Return the least rank that vLLM makes room for; raise UsageError if there is none."""
    fitting = [each for each in RANKS if each >= rank]
    if not fitting:
        raise UsageError(f"vLLM has no room for adapters of rank {rank}, only up to {RANKS[-1]}")
    return fitting[0]


async def _start(fields: Mapping[str, Any]) -> AsyncLLM:
    """Start the engine. vLLM is imported in the thread of its loop, because it keeps an error from its import; the
    error keeps the stack, and a frame that refers to the engine would keep the engine forever."""
    try:
        from vllm import AsyncEngineArgs
        from vllm.exceptions import VLLMError
        from vllm.v1.engine.async_llm import AsyncLLM
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "vllm", "vllm") from error
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**fields))
    except (VLLMError, ValueError, TypeError, RuntimeError, OSError, AssertionError) as error:
        raise UsageError(f"vLLM does not start on {fields['model']}: {error}") from error


class VllmBackend:
    """A `Backend` over vLLM's engine, made by `open_vllm`. `close` ends the engine's processes."""

    def __init__(
        self, engine: AsyncLLM, loop: LoopThread, shapes: Shapes, name: str, base: Path, adapters: AdapterVersions
    ) -> None:
        self.hash = name
        self._base, self._adapters = base, adapters
        self._engine, self._loop, self._shapes = engine, loop, shapes
        self._window: int = engine.model_config.max_model_len
        self._gate, self._numbers = WeightGate(), itertools.count()
        atexit.register(self.close)

    @property
    def version(self) -> int:
        newest = self._adapters.newest
        return self._gate.version if newest is None else newest.version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        """Do as `Backend.generate`, from any event loop."""
        check_temperature(sampling)
        if (tokens := len(prompt_ids) + sampling.max_tokens) > self._window:
            raise UsageError(f"{tokens} tokens of prompt and output exceed the model's {self._window}")
        return await self._loop.run(self._generate(tuple(prompt_ids), sampling, grammar))

    async def load_weights(self, folder: Path, version: int) -> None:
        """Do as `Backend.load_weights`, from any event loop. The prefix cache is dropped with the old weights."""
        check_same_shapes(self._shapes, folder)
        await self._loop.run(self._load(folder, version))

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Do as `Backend.load_adapter`, from any event loop: new calls use it at once."""
        check_base(folder, self._base)
        await self._loop.run(self.add_adapter(self._adapters.named(folder.resolve(), version)))

    async def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Load an adapter, within the engine's own loop; forget those that no call uses any more."""
        from vllm.exceptions import VLLMError

        try:
            await self._engine.add_lora(_request(adapter))
        except (VLLMError, RuntimeError, ValueError, OSError) as error:
            raise InfrastructureFault(f"vLLM did not load {adapter.folder}: {error}") from error
        self._adapters.add(adapter)
        for unused in self._adapters.take_unused():
            await self._engine.remove_lora(unused.number)

    def close(self) -> None:
        """End the engine. Present and later calls raise InfrastructureFault."""
        atexit.unregister(self.close)
        if self._loop.stop():
            self._engine.shutdown()
            del self._engine
            gc.collect()  # the engine's finaliser would fail at interpreter exit

    async def _generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, grammar: Grammar | None
    ) -> SampledOutput:
        async with self._gate.call():
            with self._adapters.in_use() as adapter:
                return await self._sampled(prompt_ids, sampling, grammar, adapter)

    async def _sampled(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, grammar: Grammar | None, adapter: LoadedAdapter | None
    ) -> SampledOutput:
        from vllm.exceptions import VLLMClientError, VLLMError
        from vllm.inputs import tokens_input

        try:
            request = None if adapter is None else _request(adapter)
            params = _params(sampling, grammar)
            prompt, number = tokens_input(list(prompt_ids)), str(next(self._numbers))
            steps = self._engine.generate(prompt, params, number, lora_request=request)
            output = [step async for step in steps][-1].outputs[0]
        except (VLLMClientError, ValueError) as error:
            raise UsageError(f"vLLM cannot sample in this way: {error}") from error
        except (VLLMError, IndexError) as error:
            raise InfrastructureFault(f"vLLM failed: {error}") from error
        ids, chosen = output.token_ids, output.logprobs or []
        logprobs = [step[token].logprob for token, step in zip(ids, chosen, strict=False) if token in step]
        sampled = EngineOutput(ids, logprobs, output.finish_reason, output.stop_reason)
        return checked(sampled, sampling, self._gate.version if adapter is None else adapter.version)

    async def _load(self, folder: Path, version: int) -> None:
        from vllm.exceptions import VLLMError

        async with self._gate.change(version):
            try:
                await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder.resolve())})
                await self._engine.reset_prefix_cache()
            except (VLLMError, RuntimeError, ValueError, OSError) as error:
                raise InfrastructureFault(f"vLLM did not load {folder}: {error}") from error
        for adapter in self._adapters.clear():
            await self._engine.remove_lora(adapter.number)


def _request(adapter: LoadedAdapter) -> LoRARequest:
    """Return vLLM's name for an adapter; the number is never used again, nor is the name for other content."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, str(adapter.folder))


def _params(sampling: Sampling, grammar: Grammar | None) -> SamplingParams:
    """Return vLLM's parameters: only the given stop tokens end an output, and it is not decoded."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        structured_outputs=StructuredOutputsParams(grammar=grammar.ebnf) if grammar else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
