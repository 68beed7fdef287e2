"""vLLM in this process' keeping: its engine has processes of its own, and batches concurrent calls by itself.

The engine belongs to one event loop, while a program may run one after another. So it gets a loop of its own, in a
thread, and calls from any other loop are handed over.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.hashing import digest
from harness1.policy.backend import Generation, Grammar
from harness1.policy.causal_model import Dtype
from harness1.policy.sampled import Sampled, checked
from harness1.policy.vllm_server import check_temperature
from harness1.policy.weight_files import Shapes, check_same_shapes, weight_shapes
from harness1.policy.weight_gate import WeightGate
from harness1.records import Sampling
from harness1.retrieval.model_folder import folder_hash

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

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
        folder: of the model, as `save_pretrained` of transformers writes it.
        dtype: that it computes in; the output head is float32 always.
        seed: of calls without one.
        max_model_len: tokens of prompt and output together; None: as many as the model was made for.
        memory_share: of a GPU, for weights and cache.
        options: further fields of `vllm.AsyncEngineArgs`, as `enforce_eager` or `kv_cache_memory_bytes`.

    Raises:
        UsageError: the folder holds no such model, or vLLM does not take an option, or does not start with them.
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
    """The engine. It is imported here, in the thread of its loop: vLLM keeps an error that it meets while it is
    imported, that error keeps the stack that it was met on, and a frame that knew the engine would keep it for ever."""
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
    """A `Backend` over vLLM's engine; `open_vllm` makes it. `close` ends the engine's processes."""

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
    ) -> Generation:
        """As `Backend.generate`, from any event loop."""
        check_temperature(sampling)
        if (tokens := len(prompt_ids) + sampling.max_tokens) > self._window:
            raise UsageError(f"{tokens} tokens of prompt and output do not fit the {self._window} of the model")
        return await self._loop.run(self._generate(tuple(prompt_ids), sampling, grammar))

    async def load_weights(self, folder: Path, version: int) -> None:
        """As `Backend.load_weights`, from any event loop. The cache of prefixes goes with the old weights."""
        check_same_shapes(self._shapes, folder)
        await self._loop.run(self._load(folder, version))

    def close(self) -> None:
        """End the engine. Calls in flight, and calls that come later, are faults."""
        atexit.unregister(self.close)
        if self._loop.stop():
            self._engine.shutdown()
            del self._engine
            gc.collect()  # what the engine does when it is collected fails while the interpreter ends

    async def _generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, grammar: Grammar | None) -> Generation:
        from vllm.exceptions import VLLMClientError, VLLMError
        from vllm.inputs import tokens_input

        async with self._gate.call():
            try:
                params = _params(sampling, grammar)
                steps = self._engine.generate(tokens_input(list(prompt_ids)), params, str(next(self._numbers)))
                output = [step async for step in steps][-1].outputs[0]
            except (VLLMClientError, ValueError) as error:
                raise UsageError(f"vLLM does not sample in this way: {error}") from error
            except (VLLMError, IndexError) as error:
                raise InfrastructureFault(f"vLLM failed: {error}") from error
            ids, chosen = output.token_ids, output.logprobs or []
            logprobs = [step[token].logprob for token, step in zip(ids, chosen, strict=False) if token in step]
            sampled = Sampled(ids, logprobs, output.finish_reason, output.stop_reason)
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
    """Only the stop tokens that are asked for end an output, and text is not made of it."""
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
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work there and wait for it here, where no loop runs."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work there; cancelling it here cancels it there.

        Raises:
            InfrastructureFault: the thread was stopped.
        """
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
        """Cancel what is at work there, and end the thread; False if that was done before."""
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
