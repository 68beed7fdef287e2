"""The common part of servers that take token ids and return sampled ids with log probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from harness1.errors import InfrastructureFault, Refusal, UsageError, is_unconnected
from harness1.hashing import digest
from harness1.http.model_endpoint import ModelEndpoint
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.files.weight_shapes import weight_shapes
from harness1.models.sampled import EngineOutput, checked
from harness1.models.servers.adapter_versions import AdapterVersions, LoadedAdapter
from harness1.models.weight_gate import WeightGate
from harness1.records import Sampling

PROBE_TEMPERATURES = (0.5, 2.0)
PROBE_TOKENS = 8
PROBE_DIFFERENCE = 0.1
"""In nats: above the effect of rounding and batching on a log probability, far below that of the two temperatures."""


class TokenServer(ABC):
    """A `Backend` over the server at an endpoint; `weights` is the digest or name of its initial weights, and
    `kept` the adapters that stay loaded when no call uses them."""

    raw_advice: ClassVar[str]
    """Advice on starting a server whose log probabilities belong to the distribution that it samples from."""

    adapter_advice: ClassVar[str]
    """Advice on starting a server that loads adapters."""

    def __init__(self, endpoint: ModelEndpoint, model: str, weights: str, kept: int = 2) -> None:
        self.model = model
        self.hash = digest(["token server", weights or model])
        self._endpoint, self._gate, self._adapters = endpoint, WeightGate(), AdapterVersions(kept)
        self._follows_temperature: bool | None = None

    @property
    def version(self) -> int:
        newest = self._adapters.newest
        return self._gate.version if newest is None else newest.version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        """Do as `Backend.generate`. The first call that needs to know tests whether log probabilities are processed."""
        self._check(sampling)
        async with self._gate.call():
            if sampling.temperature and _is_changed(sampling) and not await self._is_processed(prompt_ids):
                raise UsageError(
                    f"{self._endpoint.url} does not return log probabilities of the distribution that it samples from; "
                    f"{self.raw_advice}, or sample at temperature 1 with top_p 1 and top_k 0"
                )
            with self._adapters.in_use() as adapter:
                version = self._gate.version if adapter is None else adapter.version
                name = None if adapter is None else adapter.name
                return checked(await self._sample(prompt_ids, sampling, grammar, name), sampling, version)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Do as `Backend.load_weights`. The server reads the folder under the same path; if it refuses, it keeps the
        old weights."""
        folder = folder.resolve()
        weight_shapes(folder)
        async with self._gate.change(version):
            try:
                await self._load(folder, version)
            except Refusal as error:
                raise UsageError(str(error)) from error
        for adapter in self._adapters.clear():
            await self._unload(adapter)

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Do as `Backend.load_adapter`. The server reads the folder under the same path. Each version has its own name
        there; those that no call uses any more are unloaded, except the newest `kept`."""
        adapter = self._adapters.named(folder.resolve(), version)
        try:
            await self._load_adapter(adapter)
        except (Refusal, UsageError) as error:
            if is_unconnected(error):
                raise
            raise UsageError(f"{error}; to load adapters, {self.adapter_advice}") from error
        except InfrastructureFault as error:
            raise InfrastructureFault(f"{error}; to load adapters, {self.adapter_advice}") from error
        self._adapters.add(adapter)
        for unused in self._adapters.take_unused():
            await self._unload(unused)

    async def _unload(self, adapter: LoadedAdapter) -> None:
        with suppress(UsageError, InfrastructureFault):  # it may be gone, and a server evicts what takes room
            await self._unload_adapter(adapter.name)

    async def _is_processed(self, prompt_ids: Sequence[int]) -> bool:
        """Return True if the log probability of the likeliest token depends on the temperature; tested once.

        The prompt is reversed, because no model is certain after meaningless text. Simultaneous first calls may each
        test it, which costs two tokens.
        """
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
        """Return one output, unchecked; `adapter` is the name of the adapter to use."""

    @abstractmethod
    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float) -> float:
        """Return the server's log probability of the likeliest next token."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Make the server load weights; no call is in flight."""

    @abstractmethod
    async def _load_adapter(self, adapter: LoadedAdapter) -> None:
        """Make the server load an adapter under its name, beside those that it has."""

    @abstractmethod
    async def _unload_adapter(self, name: str) -> None:
        """Make the server forget an adapter."""


def server_root(url: str) -> str:
    """Return the address of a server without the `/v1` of its OpenAI-compatible paths."""
    return url.rstrip("/").removesuffix("/v1")


def _is_changed(sampling: Sampling) -> bool:
    """Return True if the sampling distribution differs from the model's."""
    return sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
