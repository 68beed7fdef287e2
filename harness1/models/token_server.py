"""Servers that take token ids, vLLM and SGLang (by its own `/generate`, "SGLang for RL Systems", "LoRA Serving"), and
what they share with vLLM in this process. SGLang's log probabilities are taken before `top_p` and `top_k`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from harness1.errors import HarnessError, InfrastructureFault, Refusal, UsageError, is_unconnected
from harness1.http.model_endpoint import ModelEndpoint
from harness1.model_folder import holds_adapters, open_tensors
from harness1.models.adapters import ADAPTER_WEIGHTS, read_adapter_config
from harness1.models.backend import EngineOutput, Grammar, SampledOutput, check_output
from harness1.plain import digest, file_digest
from harness1.records import Sampling


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in an engine, numbered from 1. Engines keep cached states by name: a name never gets other content."""

    name: str
    version: int
    number: int
    folder: Path
    calls: int = 0


class WeightGate:
    """The weights that an engine has in use. A change of whole weights waits until the calls in flight have ended, and
    later calls wait for it, so that every output is of one version. Of adapters, new calls use the newest, and calls in
    flight end on their own; the `kept` newest stay loaded for other clients."""

    def __init__(self, kept: int = 1) -> None:
        self._whole, self._calls, self._usable = 0, 0, True
        self._kept, self._count = max(1, kept), 0
        self._loaded: list[LoadedAdapter] = []
        """Oldest first."""
        self._changed: asyncio.Event | None = None
        self._drained = asyncio.Event()

    @property
    def version(self) -> int:
        return self._loaded[-1].version if self._loaded else self._whole

    @asynccontextmanager
    async def call(self) -> AsyncIterator[tuple[LoadedAdapter | None, int]]:
        """Use the newest adapter, if any, and the version of the weights; they must be in a known state."""
        while self._changed is not None:
            await self._changed.wait()
        if not self._usable:
            raise InfrastructureFault("the last change of weights failed; load them again")
        used, version = (self._loaded[-1] if self._loaded else None), self.version
        self._calls += 1
        if used is not None:
            used.calls += 1
        try:
            yield used, version
        finally:
            if used is not None:
                used.calls -= 1
            self._calls -= 1
            if not self._calls:
                self._drained.set()

    @asynccontextmanager
    async def change(self, version: int | None) -> AsyncIterator[None]:
        """Change the weights to a version (None: the same). A `UsageError` keeps the old ones, other errors none."""
        while self._changed is not None:
            await self._changed.wait()
        changed = self._changed = asyncio.Event()
        try:
            self._drained = asyncio.Event()
            if self._calls:
                await self._drained.wait()
            usable, self._usable = self._usable, False
            try:
                yield
            except UsageError:
                self._usable = usable
                raise
            self._whole, self._usable = self._whole if version is None else version, True
        finally:
            self._changed = None
            changed.set()

    def open(self, folder: Path, version: int) -> LoadedAdapter:
        """Return the adapter in a folder; raise as `read_adapter_config`."""
        read_adapter_config(folder)
        name = f"harness1-{version}-{file_digest(folder / ADAPTER_WEIGHTS)[:8]}"
        if loaded := next((each for each in self._loaded if each.name == name), None):
            return loaded  # of another number, the engine would keep the same content twice
        self._count += 1
        return LoadedAdapter(name, version, self._count, folder)

    def add(self, adapter: LoadedAdapter) -> list[LoadedAdapter]:
        """Give an adapter to all calls from now on, as the engine has loaded it; return those to unload."""
        loaded = [*(each for each in self._loaded if each.name != adapter.name), adapter]
        unused = [each for each in loaded[: -self._kept] if not each.calls]
        self._loaded = [each for each in loaded if each not in unused]
        return unused

    def clear(self) -> list[LoadedAdapter]:
        """Remove and return all adapters: whole weights take their place."""
        loaded, self._loaded = self._loaded, []
        return loaded


TensorShapes = Mapping[str, tuple[int, ...]]
TIED_HEAD = "lm_head.weight"
"""The output head, which files of a model that ties it to its embedding may include or leave out."""


def weight_shapes(folder: Path) -> TensorShapes:
    """Return the shape of every tensor in a model's folder, without torch; raise as `open_tensors`."""
    with ExitStack() as stack:
        files = open_tensors(folder, stack, "np")
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}


def check_same_shapes(opened: TensorShapes, folder: Path) -> None:
    """Raise UsageError for weights of another architecture than the opened one, which may crash an engine."""
    found = weight_shapes(folder)
    others = {name for name in opened.keys() | found.keys() if opened.get(name) != found.get(name)}
    if TIED_HEAD not in opened or TIED_HEAD not in found:
        others.discard(TIED_HEAD)
    if others:
        raise UsageError(f"{folder} holds weights of another model: {', '.join(sorted(others)[:3])}")


PROBE_TEMPERATURES = (0.5, 2.0)
PROBE_TOKENS = 8
PROBE_DIFFERENCE = 0.1
"""In nats: above the effect of rounding and batching on a log probability, far below that of the two temperatures."""


class TokenServer(ABC):
    """A `Backend` over a server, with advice on how to start one with processed log probabilities or adapters."""

    raw_advice: ClassVar[str]
    adapter_advice: ClassVar[str]

    def __init__(self, endpoint: ModelEndpoint, model: str, kept: int = 2) -> None:
        self.model = model
        self.hash = digest(["token server", model])
        self._endpoint, self._gate = endpoint, WeightGate(kept)
        self._follows_temperature: bool | None = None

    @property
    def version(self) -> int:
        return self._gate.version

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        self._check(sampling)
        async with self._gate.call() as (adapter, version):
            changed = sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
            if sampling.temperature and changed and not await self._is_processed(ids):
                raw = f"{self._endpoint.url} does not return log probabilities of the distribution that it samples from"
                raise UsageError(f"{raw}; {self.raw_advice}, or sample at temperature 1 with top_p 1 and top_k 0")
            name = None if adapter is None else adapter.name
            return check_output(await self._sample(ids, sampling, grammar, name), sampling, version)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Do as `WeightLoader.load_weights`; the server reads the folder under the same path."""
        folder = folder.resolve()
        if holds_adapters(folder):
            adapter = self._gate.open(folder, version)
            with advising(f"to load adapters, {self.adapter_advice}"):
                await self._load_adapter(adapter)
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
            with suppress(UsageError, InfrastructureFault):  # it may be gone, and a server evicts what takes room
                await self._unload_adapter(each.name)

    async def _is_processed(self, prompt_ids: Sequence[int]) -> bool:
        """Return True if log probabilities depend on the temperature; tested once, after the reversed prompt."""
        if self._follows_temperature is None:
            prompt = tuple(reversed(prompt_ids))[:PROBE_TOKENS]
            cold, hot = [await self._best_logprob(prompt, each) for each in PROBE_TEMPERATURES]
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
    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float) -> float:
        """Return the server's log probability of the likeliest next token."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Make the server load weights; no call is in flight."""

    @abstractmethod
    async def _load_adapter(self, adapter: LoadedAdapter) -> None: ...

    @abstractmethod
    async def _unload_adapter(self, name: str) -> None: ...


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
