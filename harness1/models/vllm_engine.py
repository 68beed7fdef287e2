"""vLLM in this process: its engine has subprocesses of its own and batches concurrent calls."""

from __future__ import annotations

import atexit
import gc
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.http.loop_thread import LoopThread
from harness1.model_folder import check_base, checked_base, folder_hash, holds_adapters
from harness1.models.adapters import read_adapter_config
from harness1.models.backend import EngineOutput, Grammar, SampledOutput, check_output
from harness1.models.causal_model import Dtype
from harness1.models.token_server import check_temperature
from harness1.models.weight_gate import LoadedAdapter, WeightGate, weight_shapes
from harness1.plain import digest
from harness1.records import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks of adapters that vLLM 0.31 makes room for (`MaxLoRARanks`)
ADAPTERS = 2  # adapters that a step of vLLM applies: the newest, and the one that calls in flight end with
CACHED = 32
"""Adapters that vLLM keeps in the memory of the machine. It looks for others in their folders, which are gone after
the next versions, and a missing one ends the engine: more than versions that calls in flight can be of."""


def open_vllm(
    folder: Path,
    *,
    dtype: Dtype = "bfloat16",
    max_model_len: int | None = None,
    memory_share: float = 0.85,
    adapter_rank: int = 0,
    **options: Any,
) -> VllmBackend:
    """Start vLLM on a model's folder, or one of adapters; raise UsageError if it holds no such model, or vLLM does not
    start. `max_model_len` is of prompt and output together (None: the model's), `memory_share` that of a GPU for
    weights and cache, `adapter_rank` that of adapters to come, `options` fields of `vllm.AsyncEngineArgs`."""
    base, gate = checked_base(folder), WeightGate()
    weight_shapes(base)  # raises where there are none
    first = None
    fields: dict[str, Any] = {
        "model": str(base.resolve()),
        "dtype": dtype,
        "seed": 0,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": memory_share,
        "hf_overrides": {"head_dtype": "float32"},
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if holds_adapters(folder):
        first = gate.open(folder.resolve(), 0)
        adapter_rank = max(adapter_rank, read_adapter_config(folder).r)
    if adapter_rank:
        if adapter_rank > RANKS[-1]:
            raise UsageError(f"vLLM has no room for adapters of rank {adapter_rank}, only up to {RANKS[-1]}")
        fields |= {"enable_lora": True, "max_lora_rank": min(each for each in RANKS if each >= adapter_rank)}
        fields |= {"max_loras": ADAPTERS, "max_cpu_loras": CACHED}
    loop = LoopThread("vLLM")
    try:
        engine = loop.call(_start(fields | options))
    except UsageError:
        loop.stop()
        raise
    backend = VllmBackend(engine, loop, digest(["vllm", folder_hash(folder), dtype]), base, gate)
    if first is not None:
        loop.call(backend.add_adapter(first))
    return backend


async def _start(fields: Mapping[str, Any]) -> AsyncLLM:
    """vLLM is imported in the thread of its loop: it keeps an error from its import, with the frames of the stack."""
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
    """A `Backend` over vLLM's engine, made by `open_vllm`, for any event loop. `close` ends the engine's processes."""

    def __init__(self, engine: AsyncLLM, loop: LoopThread, name: str, base: Path, gate: WeightGate) -> None:
        self.hash = name
        self._base, self._gate, self._numbers = base, gate, itertools.count()
        self._engine, self._loop = engine, loop
        self._window: int = engine.model_config.max_model_len
        atexit.register(self.close)

    @property
    def version(self) -> int:
        return self._gate.version

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        check_temperature(sampling)
        if (tokens := len(ids) + sampling.max_tokens) > self._window:
            raise UsageError(f"{tokens} tokens of prompt and output exceed the model's {self._window}")
        return await self._loop.run(self._generate(tuple(ids), sampling, grammar))

    async def load_weights(self, folder: Path, version: int) -> None:
        if holds_adapters(folder):
            check_base(folder, self._base)
            await self._loop.run(self.add_adapter(self._gate.open(folder.resolve(), version)))
        else:
            weight_shapes(folder)  # raises where there are none
            await self._loop.run(self._load(folder, version))

    async def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Load an adapter, within the engine's own loop; forget those that no call uses any more."""
        with _failing(f"vLLM did not load {adapter.folder}"):
            await self._engine.add_lora(_request(adapter))
        await self._remove(self._gate.add(adapter))

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Free the memory of the engine's GPUs within, as `Sleeper.asleep`."""
        held = AsyncExitStack()  # entered and closed in the engine's loop, which the gate belongs to

        async def wake() -> None:
            with _failing("vLLM does not take the memory of its GPUs again"):
                await self._engine.wake_up()

        async def sleep() -> None:
            await held.enter_async_context(self._gate.change(None))
            held.push_async_callback(wake)
            with _failing("vLLM does not free the memory of its GPUs"):
                await self._engine.sleep(level=1, mode="wait")

        try:
            await self._loop.run(sleep())
            yield
        finally:
            await self._loop.run(held.aclose())

    def close(self) -> None:
        """End the engine. Present and later calls raise InfrastructureFault."""
        atexit.unregister(self.close)
        if hasattr(self, "_engine"):
            self._loop.stop()
            self._engine.shutdown()
            del self._engine
            gc.collect()  # the engine's finaliser would fail at interpreter exit

    async def _generate(self, ids: tuple[int, ...], sampling: Sampling, grammar: Grammar | None) -> SampledOutput:
        from vllm.exceptions import VLLMClientError, VLLMError
        from vllm.inputs import tokens_input

        async with self._gate.call() as (adapter, version):
            try:
                request = None if adapter is None else _request(adapter)
                params = _params(sampling, grammar)
                prompt, number = tokens_input(list(ids)), str(next(self._numbers))
                steps = self._engine.generate(prompt, params, number, lora_request=request)
                output = [step async for step in steps][-1].outputs[0]
            except (VLLMClientError, ValueError) as error:
                raise UsageError(f"vLLM cannot sample in this way: {error}") from error
            except (VLLMError, IndexError) as error:
                raise InfrastructureFault(f"vLLM failed: {error}") from error
        ids, chosen = output.token_ids, output.logprobs or []
        logprobs = [step[token].logprob for token, step in zip(ids, chosen, strict=False) if token in step]
        return check_output(EngineOutput(ids, logprobs, output.finish_reason, output.stop_reason), sampling, version)

    async def _load(self, folder: Path, version: int) -> None:
        async with self._gate.change(version):
            with _failing(f"vLLM did not load {folder}"):
                await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder.resolve())})
                await self._engine.reset_prefix_cache()
        await self._remove(self._gate.clear())

    async def _remove(self, adapters: Iterable[LoadedAdapter]) -> None:
        for adapter in adapters:
            await self._engine.remove_lora(adapter.number)


@contextmanager
def _failing(words: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # vLLM raises that type itself, whatever a worker has raised
        raise InfrastructureFault(f"{words}: {error}") from error


def _request(adapter: LoadedAdapter) -> LoRARequest:
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
