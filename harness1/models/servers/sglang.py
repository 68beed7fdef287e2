"""SGLang servers, through the native `/generate` route.

    python -m sglang.launch_server --model-path MODEL

Log probabilities are taken after temperature and grammar but before `top_p` and `top_k`, so those are refused. Weights
are loaded through `/update_weights_from_disk` (SGLang docs, "SGLang for RL Systems"), and adapters through
`/load_lora_adapter` ("LoRA Serving"), whose names go into the field `lora_path` of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import InfrastructureFault, UsageError
from harness1.models.backend import Grammar
from harness1.models.sampled import EngineOutput
from harness1.models.servers.adapter_versions import LoadedAdapter
from harness1.models.servers.token_server import TokenServer
from harness1.records import Sampling

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


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


class _Loaded(msgspec.Struct):
    success: bool
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
            raise InfrastructureFault(
                f"{self._endpoint.url} read {meta.prompt_tokens} prompt tokens instead of {len(prompt_ids)}"
            )
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
        updated = await self._endpoint.post("/update_weights_from_disk", body, _Updated)
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
