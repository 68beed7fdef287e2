"""Servers that take token ids: vLLM, and SGLang through its native `/generate` route.

SGLang's log probabilities are taken after temperature and grammar but before `top_p` and `top_k`, so those are refused.
Its weights are loaded through `/update_weights_from_disk` (SGLang docs, "SGLang for RL Systems"), and adapters through
`/load_lora_adapter` ("LoRA Serving"), whose names go into the field `lora_path` of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import InfrastructureFault, Refusal, UsageError
from harness1.models.backend import EngineOutput, Grammar
from harness1.models.token_server import LoadedAdapter, TokenServer, advising
from harness1.records import Sampling

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
    adapter_advice = (
        "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank of at least train.lora.rank"
        ", --max-loras of rl.staleness + 2 and --max-cpu-loras 32"
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
        """A pause request that got no answer may have taken effect, so the pause is always ended."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        with advising("to load weights, start vLLM with VLLM_SERVER_DEV_MODE=1", of=UsageError):
            try:
                await self._endpoint.post("/pause?mode=wait", {}, msgspec.Raw)
                await self._endpoint.post("/collective_rpc", reload, msgspec.Raw)
            finally:
                await self._endpoint.post("/resume", {}, msgspec.Raw)

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Do as `Sleeper.asleep`. A server that an earlier training has left asleep is awake afterwards."""
        async with self._gate.change(None):
            with advising("to let it sleep, start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"):
                await self._endpoint.post("/sleep?level=1&mode=wait", {}, bytes)
            try:
                yield
            finally:
                await self._endpoint.post("/wake_up", {}, bytes)

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
        """Penalties override the model's own defaults; with `ignore_eos` only the given stop tokens end an output."""
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


Drawn = tuple[float | None, int, str | None]
"""Log probability, token id and text of a token."""


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    finish_reason: _Finish | None = None
    output_token_logprobs: list[Drawn] | None = None
    output_top_logprobs: list[list[Drawn] | None] | None = None
    weight_version: str | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta


class _Loaded(msgspec.Struct):
    success: bool
    message: str | None = None
    error_message: str | None = None
    loaded_adapters: dict[str, str] | None = None


class SglangServer(TokenServer):
    """An SGLang server. It respects seeds if it was started with `--enable-deterministic-inference`."""

    raw_advice = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    adapter_advice = (
        "start SGLang with --enable-lora, --lora-target-modules all, --max-lora-rank of at least train.lora.rank and"
        " --max-loras-per-batch of rl.staleness + 2"
    )

    def _check(self, sampling: Sampling) -> None:
        if sampling.temperature and (sampling.top_p < 1.0 or sampling.top_k > 0):
            raise UsageError("SGLang has no log probabilities after top_p and top_k: set top_p to 1 and top_k to 0")

    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None, adapter: str | None
    ) -> EngineOutput:
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": sampling.stop_ids,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if grammar is not None:
            params["ebnf"] = grammar.ebnf
        chosen = {} if adapter is None else {"lora_path": adapter}
        meta = await self._ask(prompt_ids, params, **chosen)
        if meta.prompt_tokens != len(prompt_ids):
            wrong = f"{meta.prompt_tokens} prompt tokens instead of {len(prompt_ids)}"
            raise InfrastructureFault(f"{self._endpoint.url} read {wrong}")
        drawn, finish = meta.output_token_logprobs or [], meta.finish_reason or _Finish("")
        ids, logprobs = [token for _, token, _ in drawn], [logprob for logprob, _, _ in drawn]
        tag = meta.weight_version or ""
        version = int(tag) if adapter is None and tag.isdecimal() else None
        return EngineOutput(ids, logprobs, finish.type, finish.matched, version)

    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float) -> float:
        params = {"temperature": temperature, "max_new_tokens": 1}
        top = (await self._ask(prompt_ids, params, top_logprobs_num=1)).output_top_logprobs
        if not top or not top[0] or top[0][0][0] is None:
            raise InfrastructureFault(f"{self._endpoint.url} returned no log probabilities")
        return top[0][0][0]

    async def _load(self, folder: Path, version: int) -> None:
        # If loading fails, SGLang keeps the old weights and answers 400.
        body = {"model_path": str(folder), "weight_version": str(version)}
        updated = await self._endpoint.post("/update_weights_from_disk", body, _Loaded)
        if not updated.success:
            raise InfrastructureFault(f"{self._endpoint.url} did not load {folder}: {updated.message}")

    async def _load_adapter(self, adapter: LoadedAdapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        loaded = await self._endpoint.post("/load_lora_adapter", body, _Loaded)
        if not loaded.success and adapter.name not in (loaded.loaded_adapters or {}):
            raise InfrastructureFault(f"{self._endpoint.url} did not load {adapter.folder}: {loaded.error_message}")

    async def _unload_adapter(self, name: str) -> None:
        await self._endpoint.post("/unload_lora_adapter", {"lora_name": name}, _Loaded)

    async def _ask(self, prompt_ids: Sequence[int], params: dict[str, Any], **more: Any) -> _Meta:
        body = {"input_ids": tuple(prompt_ids), "sampling_params": params, "return_logprob": True, **more}
        return (await self._endpoint.post("/generate", body, _Answer)).meta_info
