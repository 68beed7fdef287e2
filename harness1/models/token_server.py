"""A vLLM server, which takes token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

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
PROCESSED = "start vLLM with --logprobs-mode processed_logprobs"
LENDING = "to let it sleep, start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
UPDATING = (
    "to load adapters, start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank of at least"
    " train.lora.rank, --max-loras of rl.staleness + 2 and --max-cpu-loras 32"
)


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


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


class VllmServer:
    """A `Backend` over a server. A grammar masks both sampling and log probabilities. A `model` that is a folder of
    adapters is loaded beside the server's own with the first call; the server evicts those that none uses."""

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
        check_temperature(sampling)
        async with self._gate.call() as (adapter, version):
            if adapter is None:
                return await self._sample(ids, sampling, grammar, None, version)
            if adapter.name not in self._given:
                await self._give(adapter)
            try:
                return await self._sample(ids, sampling, grammar, adapter.name, version)
            except (Unreachable, Refusal) as error:
                if adapter.name not in str(error):
                    raise
            await self._give(adapter)  # the server was started anew, or another process has unloaded it
            return await self._sample(ids, sampling, grammar, adapter.name, version)

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
                    await self._load(folder)
                except Refusal as error:
                    raise UsageError(str(error)) from error
            unused = self._gate.clear()
        for each in unused:
            self._given.discard(each.name)
            with suppress(UsageError, InfrastructureFault):  # it may be gone, and a server evicts what takes room
                await self._endpoint.post("/v1/unload_lora_adapter", {"lora_name": each.name}, bytes)

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Do as `Sleeper.asleep`. A server that an earlier training has left asleep is awake afterwards."""
        async with self._gate.change(None):
            with _advising(LENDING):
                await self._endpoint.post("/sleep?level=1&mode=wait", {}, bytes)
            try:
                yield
            finally:
                await self._endpoint.post("/wake_up", {}, bytes)

    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None, adapter: str | None, version: int
    ) -> SampledOutput:
        changed = sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
        if sampling.temperature and changed and not await self._is_processed(prompt_ids, adapter):
            raw = f"{self._endpoint.url} does not return log probabilities of the distribution that it samples from"
            raise UsageError(f"{raw}; {PROCESSED}, or sample at temperature 1 with top_p 1 and top_k 0")
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
        output = EngineOutput(choice.token_ids, logprobs, choice.finish_reason, choice.stop_reason)
        return check_output(output, sampling, version)

    async def _is_processed(self, prompt_ids: Sequence[int], adapter: str | None) -> bool:
        """Return True if log probabilities depend on the temperature; tested once, after the reversed prompt."""
        if self._follows_temperature is None:
            prompt, best = tuple(reversed(prompt_ids))[:PROBE_TOKENS], list[float]()
            for temperature in PROBE_TEMPERATURES:
                choice = await self._ask(self._body(prompt, temperature, adapter) | {"max_tokens": 1, "logprobs": 1})
                top = choice.logprobs.top_logprobs if choice.logprobs else None
                if not top or not top[0]:
                    raise InfrastructureFault(f"{self._endpoint.url} returned no log probabilities")
                best.append(max(top[0].values()))
            self._follows_temperature = best[0] - best[1] > PROBE_DIFFERENCE
        return self._follows_temperature

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

    async def _load(self, folder: Path) -> None:
        """A pause request that got no answer may have taken effect, so the pause is always ended."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        with _advising("to load weights, start vLLM with VLLM_SERVER_DEV_MODE=1", of=UsageError):
            try:
                await self._endpoint.post("/pause?mode=wait", {}, msgspec.Raw)
                await self._endpoint.post("/collective_rpc", reload, msgspec.Raw)
            finally:
                await self._endpoint.post("/resume", {}, msgspec.Raw)

    async def _give(self, adapter: LoadedAdapter) -> None:
        """Make the server load an adapter of the model that it serves; raise UsageError if it is of another one."""
        if not self._given:
            cards = (await self._endpoint.post("/v1/models", None, _Cards)).data
            served = {name for card in cards if card.parent is None for name in (card.id, card.root or card.id)}
            if not any(is_base(adapter.folder, name) for name in sorted(served)):
                base = base_name(adapter.folder)
                wrong = f"{self._endpoint.url} serves {' or '.join(sorted(served))}, and the adapters in"
                raise UsageError(f"{wrong} {adapter.folder} belong to {base}: serve that, or serve it by that name")
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder), "load_inplace": False}
        with _advising(UPDATING):
            try:
                await self._endpoint.post("/v1/load_lora_adapter", body, bytes)
            except Refusal as error:
                if "already" not in str(error):  # another call or process has loaded it, or a try that got no answer
                    raise
        self._given.add(adapter.name)


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
