"""Servers that take token ids, vLLM and SGLang (by its own `/generate`, "SGLang for RL Systems", "LoRA Serving").
SGLang's log probabilities are taken before `top_p` and `top_k`."""

from __future__ import annotations

import atexit
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from harness1.errors import HarnessError, InfrastructureFault, Refusal, Unreachable, UsageError, is_unconnected
from harness1.http.model_endpoint import ModelEndpoint
from harness1.model_folder import base_name, holds_adapters, is_base
from harness1.models.backend import EngineOutput, Grammar, SampledOutput, check_output
from harness1.models.weight_gate import LoadedAdapter, WeightGate, weight_shapes
from harness1.plain import digest
from harness1.records import Sampling

PROBE_TEMPERATURES = (0.5, 2.0)
PROBE_TOKENS = 8
PROBE_DIFFERENCE = 0.1
"""In nats: above the effect of rounding and batching on a log probability, far below that of the two temperatures."""


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class TokenServer(ABC):
    """A `Backend` over a server, with advice on how to start one with processed log probabilities or adapters. A
    `model` that is a folder of adapters is loaded beside the server's own with the first call, and unloaded at the end
    of the process that loaded it; other processes that still use it load it again."""

    raw_advice: ClassVar[str]
    adapter_advice: ClassVar[str]
    unload_path: ClassVar[str]

    def __init__(self, endpoint: ModelEndpoint, model: str, kept: int = 2) -> None:
        self.model = model
        self._endpoint, self._gate = endpoint, WeightGate(kept)
        self._follows_temperature: bool | None = None
        self._given: dict[str, bool] = {}
        """The adapters that the server has, by name, with True for those that this process has loaded."""
        if holds_adapters(folder := Path(model).expanduser()):
            adapter = self._gate.open(folder.resolve(), 0)
            self._gate.add(adapter)
            model = adapter.name
        self.hash = digest(["token server", model])

    @property
    def version(self) -> int:
        return self._gate.version

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        self._check(sampling)
        async with self._gate.call() as (adapter, version):
            if adapter is None:
                return await self._checked(ids, sampling, grammar, None, version)
            if adapter.name not in self._given:
                await self._give(adapter)
            try:
                return await self._checked(ids, sampling, grammar, adapter.name, version)
            except (Unreachable, Refusal) as error:
                if adapter.name not in str(error):
                    raise
            await self._give(adapter)  # the server was started anew, or another process has unloaded it
            return await self._checked(ids, sampling, grammar, adapter.name, version)

    async def _checked(
        self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None, adapter: str | None, version: int
    ) -> SampledOutput:
        changed = sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
        if sampling.temperature and changed and not await self._is_processed(ids, adapter):
            raw = f"{self._endpoint.url} does not return log probabilities of the distribution that it samples from"
            raise UsageError(f"{raw}; {self.raw_advice}, or sample at temperature 1 with top_p 1 and top_k 0")
        return check_output(await self._sample(ids, sampling, grammar, adapter), sampling, version)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Do as `WeightLoader.load_weights`; the server reads the folder under the same path."""
        folder = folder.resolve()
        if holds_adapters(folder):
            adapter = self._gate.open(folder, version)
            await self._give(adapter)
            unused = self._gate.add(adapter)
        else:
            weight_shapes(folder)
            async with self._gate.change(version):
                try:
                    await self._load(folder, version)
                except Refusal as error:
                    raise UsageError(str(error)) from error
            unused = self._gate.clear()
        for each in unused:
            self._given.pop(each.name, None)
            with suppress(UsageError, InfrastructureFault):  # it may be gone, and a server evicts what takes room
                await self._unload_adapter(each.name)

    async def _give(self, adapter: LoadedAdapter) -> None:
        """Make the server load an adapter of the model that it serves; raise UsageError if it is of another one."""
        if not self._given:
            cards = (await self._endpoint.post("/v1/models", None, _Cards)).data
            served = {name for card in cards if card.parent is None for name in (card.id, card.root or card.id)}
            if not any(is_base(adapter.folder, name) for name in sorted(served)):
                base = base_name(adapter.folder)
                wrong = f"{self._endpoint.url} serves {' or '.join(sorted(served))}, and the adapters in"
                raise UsageError(f"{wrong} {adapter.folder} belong to {base}: serve that, or serve it by that name")
        with advising(f"to load adapters, {self.adapter_advice}"):
            loaded = await self._load_adapter(adapter)
        if loaded and True not in self._given.values():
            atexit.register(self.close)
        self._given[adapter.name] = loaded or self._given.get(adapter.name, False)

    def close(self) -> None:
        """Unload the adapters that this process has loaded."""
        atexit.unregister(self.close)
        for name, ours in self._given.items():
            if ours:
                self._endpoint.client.tell(self.unload_path, {"lora_name": name})
        self._given = {}

    async def _is_processed(self, prompt_ids: Sequence[int], adapter: str | None) -> bool:
        """Return True if log probabilities depend on the temperature; tested once, after the reversed prompt."""
        if self._follows_temperature is None:
            prompt = tuple(reversed(prompt_ids))[:PROBE_TOKENS]
            cold, hot = [await self._best_logprob(prompt, each, adapter) for each in PROBE_TEMPERATURES]
            self._follows_temperature = cold - hot > PROBE_DIFFERENCE
        return self._follows_temperature

    @abstractmethod
    def _check(self, sampling: Sampling) -> None:
        """Raise UsageError if the server cannot sample in this way."""

    @abstractmethod
    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None, adapter: str | None
    ) -> EngineOutput:
        """Return one output, unchecked, with the adapter of a name."""

    @abstractmethod
    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float, adapter: str | None) -> float:
        """Return the server's log probability of the likeliest next token."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Make the server load weights; no call is in flight."""

    @abstractmethod
    async def _load_adapter(self, adapter: LoadedAdapter) -> bool:
        """Make the server load an adapter; return False if it had it."""

    async def _unload_adapter(self, name: str) -> None:
        await self._endpoint.post(self.unload_path, {"lora_name": name}, bytes)


@contextmanager
def advising(advice: str, of: type[HarnessError] = HarnessError) -> Iterator[None]:
    """Add advice to errors of a type; what a server refuses is the user's to mend."""
    try:
        yield
    except of as error:
        if is_unconnected(error):
            raise
        kind = UsageError if isinstance(error, (UsageError, Refusal)) else InfrastructureFault
        raise kind(f"{error}; {advice}") from error


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
    unload_path = "/v1/unload_lora_adapter"

    def _check(self, sampling: Sampling) -> None:
        check_temperature(sampling)

    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None, adapter: str | None
    ) -> EngineOutput:
        body: dict[str, Any] = self._body(prompt_ids, sampling.temperature, adapter) | {
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

    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float, adapter: str | None) -> float:
        choice = await self._ask(self._body(prompt_ids, temperature, adapter) | {"max_tokens": 1, "logprobs": 1})
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

    async def _load_adapter(self, adapter: LoadedAdapter) -> bool:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder), "load_inplace": False}
        try:
            await self._endpoint.post("/v1/load_lora_adapter", body, bytes)
        except Refusal as error:
            if "already" not in str(error):  # another call or process has loaded it, or a try that got no answer
                raise
            return False
        return True

    def _body(self, prompt_ids: Sequence[int], temperature: float, adapter: str | None) -> dict[str, Any]:
        """Penalties override the model's own defaults; with `ignore_eos` only the given stop tokens end an output."""
        return {
            "model": adapter or self.model,
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
    unload_path = "/unload_lora_adapter"

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
        meta = await self._ask(prompt_ids, params, adapter)
        if meta.prompt_tokens != len(prompt_ids):
            wrong = f"{meta.prompt_tokens} prompt tokens instead of {len(prompt_ids)}"
            raise InfrastructureFault(f"{self._endpoint.url} read {wrong}")
        drawn, finish = meta.output_token_logprobs or [], meta.finish_reason or _Finish("")
        ids, logprobs = [token for _, token, _ in drawn], [logprob for logprob, _, _ in drawn]
        tag = meta.weight_version or ""
        version = int(tag) if adapter is None and tag.isdecimal() else None
        return EngineOutput(ids, logprobs, finish.type, finish.matched, version)

    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float, adapter: str | None) -> float:
        params = {"temperature": temperature, "max_new_tokens": 1}
        top = (await self._ask(prompt_ids, params, adapter, top_logprobs_num=1)).output_top_logprobs
        if not top or not top[0] or top[0][0][0] is None:
            raise InfrastructureFault(f"{self._endpoint.url} returned no log probabilities")
        return top[0][0][0]

    async def _load(self, folder: Path, version: int) -> None:
        # If loading fails, SGLang keeps the old weights and answers 400.
        body = {"model_path": str(folder), "weight_version": str(version)}
        updated = await self._endpoint.post("/update_weights_from_disk", body, _Loaded)
        if not updated.success:
            raise InfrastructureFault(f"{self._endpoint.url} did not load {folder}: {updated.message}")

    async def _load_adapter(self, adapter: LoadedAdapter) -> bool:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        try:
            loaded = await self._endpoint.post("/load_lora_adapter", body, _Loaded)
        except Refusal as error:
            if "already" not in str(error):
                raise
            return False
        if not loaded.success and adapter.name not in (loaded.loaded_adapters or {}):
            raise InfrastructureFault(f"{self._endpoint.url} did not load {adapter.folder}: {loaded.error_message}")
        return loaded.success

    async def _ask(self, prompt_ids: Sequence[int], params: dict[str, Any], adapter: str | None, **more: Any) -> _Meta:
        body = {"input_ids": tuple(prompt_ids), "sampling_params": params, "return_logprob": True, **more}
        if adapter is not None:
            body["lora_path"] = adapter
        return (await self._endpoint.post("/generate", body, _Answer)).meta_info
