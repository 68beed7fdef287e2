"""vLLM: servers that take token ids, and the engine, which has its own subprocesses and batches concurrent calls."""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.hashing import digest
from harness1.model_folder import folder_hash
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.files.weight_shapes import Shapes, check_same_shapes, weight_shapes
from harness1.models.sampled import EngineOutput, checked
from harness1.models.servers.token_server import TokenServer
from harness1.models.transformers.causal_model import Dtype
from harness1.models.weight_gate import WeightGate
from harness1.records import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


COLDEST = 0.01
"""Lowest temperature above 0; vLLM silently raises lower ones to it."""


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

    def _check(self, sampling: Sampling) -> None:
        check_temperature(sampling)

    async def _sample(self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None) -> EngineOutput:
        body: dict[str, Any] = self._body(prompt_ids, sampling.temperature) | {
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


Result = TypeVar("Result")


def open_vllm(
    folder: Path,
    *,
    dtype: Dtype = "bfloat16",
    seed: int = 0,
    max_model_len: int | None = None,
    memory_share: float = 0.85,
    **options: Any,
) -> VllmBackend:
    """Start vLLM on a model.

    Args:
        folder: model folder as transformers' `save_pretrained` writes it.
        dtype: type of computation, except for the output head, which is always float32.
        seed: seed of calls without their own.
        max_model_len: tokens of prompt and output together; None for the model's maximum.
        memory_share: share of a GPU for weights and cache.
        options: further fields of `vllm.AsyncEngineArgs`, such as `enforce_eager` or `kv_cache_memory_bytes`.

    Raises:
        UsageError: the folder does not hold such a model, or vLLM does not start with the options.
        MissingExtra: vLLM is not installed.
    """
    shapes = weight_shapes(folder)
    fields = {
        "model": str(folder.resolve()),
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": memory_share,
        "hf_overrides": {"head_dtype": "float32"},
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    loop = _LoopThread()
    try:
        engine = loop.call(_start(fields | options))
    except UsageError:
        loop.stop()
        raise
    return VllmBackend(engine, loop, shapes, digest(["vllm", folder_hash(folder), dtype]))


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

    def __init__(self, engine: AsyncLLM, loop: _LoopThread, shapes: Shapes, name: str) -> None:
        self.hash = name
        self._engine, self._loop, self._shapes = engine, loop, shapes
        self._window: int = engine.model_config.max_model_len
        self._gate, self._numbers = WeightGate(), itertools.count()
        atexit.register(self.close)

    @property
    def version(self) -> int:
        return self._gate.version

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
        from vllm.exceptions import VLLMClientError, VLLMError
        from vllm.inputs import tokens_input

        async with self._gate.call():
            try:
                params = _params(sampling, grammar)
                steps = self._engine.generate(tokens_input(list(prompt_ids)), params, str(next(self._numbers)))
                output = [step async for step in steps][-1].outputs[0]
            except (VLLMClientError, ValueError) as error:
                raise UsageError(f"vLLM cannot sample in this way: {error}") from error
            except (VLLMError, IndexError) as error:
                raise InfrastructureFault(f"vLLM failed: {error}") from error
            ids, chosen = output.token_ids, output.logprobs or []
            logprobs = [step[token].logprob for token, step in zip(ids, chosen, strict=False) if token in step]
            sampled = EngineOutput(ids, logprobs, output.finish_reason, output.stop_reason)
            return checked(sampled, sampling, self._gate.version)

    async def _load(self, folder: Path, version: int) -> None:
        from vllm.exceptions import VLLMError

        async with self._gate.change(version):
            try:
                await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder.resolve())})
                await self._engine.reset_prefix_cache()
            except (VLLMError, RuntimeError, ValueError, OSError) as error:
                raise InfrastructureFault(f"vLLM did not load {folder}: {error}") from error


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


class _LoopThread:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and block until it is done."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and await it, with cancellation; raise InfrastructureFault if it was stopped."""
        if self._stopped:
            work.close()
            raise InfrastructureFault("vLLM was closed")
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            if self._stopped:
                raise InfrastructureFault("vLLM was closed") from None
            raise

    def stop(self) -> bool:
        """Cancel all work and end the thread; return False if it was already stopped."""
        if self._stopped:
            return False
        self._stopped = True
        self.call(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return True


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
