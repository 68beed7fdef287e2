"""Servers that take token ids, vLLM and SGLang (by its own `/generate`, "SGLang for RL Systems", "LoRA Serving").
SGLang's log probabilities are taken before `top_p` and `top_k`."""

from __future__ import annotations

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
COLDEST = 0.01  # lowest temperature above 0; vLLM silently raises lower ones to it


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class TokenServer(ABC):
    """A `Backend` over a server. A `model` that is a folder of adapters is loaded beside the server's own with the
    first call; the server evicts those that none uses."""

    processed: ClassVar[str]  # how to start the server with processed log probabilities
    updating: ClassVar[str]  # how to start it for adapters
    adapters: ClassVar[str] = ""  # what stands before the paths that load and unload adapters

    def __init__(self, endpoint: ModelEndpoint, model: str, kept: int = 2) -> None:
        self.model = model
        self._endpoint, self._gate = endpoint, WeightGate(kept)
        self._follows_temperature: bool | None = None
        self._given: set[str] = set()  # the names of adapters that the server has
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
            self._given.discard(each.name)
            with suppress(UsageError, InfrastructureFault):  # it may be gone, and a server evicts what takes room
                await self._endpoint.post(f"{self.adapters}/unload_lora_adapter", {"lora_name": each.name}, bytes)

    async def _checked(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None, adapter: str | None, version: int
    ) -> SampledOutput:
        changed = sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
        if sampling.temperature and changed and not await self._is_processed(prompt_ids, adapter):
            raw = f"{self._endpoint.url} does not return log probabilities of the distribution that it samples from"
            raise UsageError(f"{raw}; {self.processed}, or sample at temperature 1 with top_p 1 and top_k 0")
        return check_output(await self._sample(prompt_ids, sampling, grammar, adapter), sampling, version)

    async def _is_processed(self, prompt_ids: Sequence[int], adapter: str | None) -> bool:
        """Return True if log probabilities depend on the temperature; tested once, after the reversed prompt."""
        if self._follows_temperature is None:
            prompt = tuple(reversed(prompt_ids))[:PROBE_TOKENS]
            cold, hot = [await self._best_logprob(prompt, each, adapter) for each in PROBE_TEMPERATURES]
            if cold is None or hot is None:
                raise InfrastructureFault(f"{self._endpoint.url} returned no log probabilities")
            self._follows_temperature = cold - hot > PROBE_DIFFERENCE
        return self._follows_temperature

    async def _give(self, adapter: LoadedAdapter) -> None:
        """Make the server load an adapter of the model that it serves; raise UsageError if it is of another one."""
        if not self._given:
            cards = (await self._endpoint.post("/v1/models", None, _Cards)).data
            served = {name for card in cards if card.parent is None for name in (card.id, card.root or card.id)}
            if not any(is_base(adapter.folder, name) for name in sorted(served)):
                base = base_name(adapter.folder)
                wrong = f"{self._endpoint.url} serves {' or '.join(sorted(served))}, and the adapters in"
                raise UsageError(f"{wrong} {adapter.folder} belong to {base}: serve that, or serve it by that name")
        with _advising(self.updating):
            try:
                await self._load_adapter({"lora_name": adapter.name, "lora_path": str(adapter.folder)})
            except Refusal as error:
                if "already" not in str(error):  # another call or process has loaded it, or a try that got no answer
                    raise
        self._given.add(adapter.name)

    @abstractmethod
    def _check(self, sampling: Sampling) -> None:
        """Raise UsageError if the server cannot sample in this way."""

    @abstractmethod
    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None, adapter: str | None
    ) -> EngineOutput:
        """Return one output, unchecked, with the adapter of a name."""

    @abstractmethod
    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float, adapter: str | None) -> float | None:
        """Return the log probability of the likeliest next token; None if the server gives none."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Make the server load weights; no call is in flight."""

    @abstractmethod
    async def _load_adapter(self, body: dict[str, str]) -> None:
        """Make the server load the adapter of a name and path."""


@contextmanager
def _advising(advice: str, of: type[HarnessError] = HarnessError) -> Iterator[None]:
    """Add advice to errors of a type; what a server refuses is the user's to mend."""
    try:
        yield
    except of as error:
        if is_unconnected(error):
            raise
        kind = UsageError if isinstance(error, (UsageError, Refusal)) else InfrastructureFault
        raise kind(f"{error}; {advice}") from error


def check_temperature(sampling: Sampling) -> None:
    """Raise UsageError for a temperature that vLLM would replace: one between 0 and 0.01."""
    if 0.0 < sampling.temperature < COLDEST:
        raise UsageError(f"vLLM cannot sample at temperature {sampling.temperature}: use 0, or at least {COLDEST}")


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

    processed = "start vLLM with --logprobs-mode processed_logprobs"
    updating = (
        "to load adapters, start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank of at"
        " least train.lora.rank, --max-loras of rl.staleness + 2 and --max-cpu-loras 32"
    )
    adapters = "/v1"

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

    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float, adapter: str | None) -> float | None:
        choice = await self._ask(self._body(prompt_ids, temperature, adapter) | {"max_tokens": 1, "logprobs": 1})
        top = choice.logprobs.top_logprobs if choice.logprobs else None
        return max(top[0].values()) if top and top[0] else None

    async def _load(self, folder: Path, version: int) -> None:
        """A pause request that got no answer may have taken effect, so the pause is always ended."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        with _advising("to load weights, start vLLM with VLLM_SERVER_DEV_MODE=1", of=UsageError):
            try:
                await self._endpoint.post("/pause?mode=wait", {}, msgspec.Raw)
                await self._endpoint.post("/collective_rpc", reload, msgspec.Raw)
            finally:
                await self._endpoint.post("/resume", {}, msgspec.Raw)

    async def _load_adapter(self, body: dict[str, str]) -> None:
        await self._endpoint.post("/v1/load_lora_adapter", {**body, "load_inplace": False}, bytes)

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Do as `Sleeper.asleep`. A server that an earlier training has left asleep is awake afterwards."""
        async with self._gate.change(None):
            with _advising("to let it sleep, start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"):
                await self._endpoint.post("/sleep?level=1&mode=wait", {}, bytes)
            try:
                yield
            finally:
                await self._endpoint.post("/wake_up", {}, bytes)

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


Drawn = tuple[float | None, int, str | None]  # log probability, token id and text of a token


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


class _Changed(msgspec.Struct):
    success: bool
    message: str | None = None
    error_message: str | None = None


class SglangServer(TokenServer):
    """An SGLang server. It respects seeds if it was started with `--enable-deterministic-inference`."""

    processed = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    updating = (
        "to load adapters, start SGLang with --enable-lora, --lora-target-modules all, --max-lora-rank of at least"
        " train.lora.rank and --max-loras-per-batch of rl.staleness + 2"
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
        meta = await self._ask(prompt_ids, params, adapter)
        if meta.prompt_tokens != len(prompt_ids):
            wrong = f"{meta.prompt_tokens} prompt tokens instead of {len(prompt_ids)}"
            raise InfrastructureFault(f"{self._endpoint.url} read {wrong}")
        drawn, finish = meta.output_token_logprobs or [], meta.finish_reason or _Finish("")
        ids, logprobs = [token for _, token, _ in drawn], [logprob for logprob, _, _ in drawn]
        tag = meta.weight_version or ""
        version = int(tag) if adapter is None and tag.isdecimal() else None
        return EngineOutput(ids, logprobs, finish.type, finish.matched, version)

    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float, adapter: str | None) -> float | None:
        params = {"temperature": temperature, "max_new_tokens": 1}
        top = (await self._ask(prompt_ids, params, adapter, top_logprobs_num=1)).output_top_logprobs
        return top[0][0][0] if top and top[0] else None

    async def _load(self, folder: Path, version: int) -> None:
        await self._change("/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)})

    async def _load_adapter(self, body: dict[str, str]) -> None:
        await self._change("/load_lora_adapter", body)

    async def _change(self, path: str, body: dict[str, str]) -> None:
        """If loading fails, SGLang keeps what it had and answers 400."""
        changed = await self._endpoint.post(path, body, _Changed)
        if not changed.success:
            raise Refusal(f"{self._endpoint.url}{path}: {changed.message or changed.error_message}")

    async def _ask(self, prompt_ids: Sequence[int], params: dict[str, Any], adapter: str | None, **more: Any) -> _Meta:
        body = {"input_ids": tuple(prompt_ids), "sampling_params": params, "return_logprob": True, **more}
        if adapter is not None:
            body["lora_path"] = adapter
        return (await self._endpoint.post("/generate", body, _Answer)).meta_info
