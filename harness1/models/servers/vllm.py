"""vLLM behind a server that takes token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import InfrastructureFault, Refusal, UsageError, is_unconnected
from harness1.models.backend import Grammar
from harness1.models.sampled import EngineOutput
from harness1.models.servers.adapter_versions import LoadedAdapter
from harness1.models.servers.token_server import TokenServer
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
    sleep_advice = "start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"

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
            if is_unconnected(error):
                raise
            raise UsageError(f"{error}; to load weights, start vLLM with VLLM_SERVER_DEV_MODE=1") from error

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Free the memory of the server's GPUs within, as `Sleeper.asleep`. A server that an earlier training has left
        asleep is awake afterwards."""
        async with self._gate.change(self._gate.version):
            try:
                await self._endpoint.post("/sleep?level=1&mode=wait", {}, bytes)
            except UsageError as error:
                if is_unconnected(error):
                    raise
                raise UsageError(f"{error}; to let it sleep, {self.sleep_advice}") from error
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
