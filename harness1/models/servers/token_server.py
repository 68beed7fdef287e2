"""The common part of servers that take token ids and return sampled ids with log probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from harness1.errors import Refusal, UsageError
from harness1.hashing import digest
from harness1.http.model_endpoint import ModelEndpoint
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.files.weight_shapes import weight_shapes
from harness1.models.sampled import EngineOutput, checked
from harness1.models.weight_gate import WeightGate
from harness1.records import Sampling

PROBE_TEMPERATURES = (0.5, 2.0)
PROBE_TOKENS = 8
PROBE_DIFFERENCE = 0.1
"""In nats: above the effect of rounding and batching on a log probability, far below that of the two temperatures."""


class TokenServer(ABC):
    """A `Backend` over the server at an endpoint; `weights` is the digest or name of its initial weights."""

    raw_advice: ClassVar[str]
    """Advice on starting a server whose log probabilities belong to the distribution that it samples from."""

    def __init__(self, endpoint: ModelEndpoint, model: str, weights: str) -> None:
        self.model = model
        self.hash = digest(["token server", weights or model])
        self._endpoint, self._gate = endpoint, WeightGate()
        self._follows_temperature: bool | None = None

    @property
    def version(self) -> int:
        return self._gate.version

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
            sampled = await self._sample(prompt_ids, sampling, grammar)
            return checked(sampled, sampling, self._gate.version)

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
    async def _sample(self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None) -> EngineOutput:
        """Return one output, unchecked."""

    @abstractmethod
    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float) -> float:
        """Return the server's log probability of the likeliest next token."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Make the server load weights; no call is in flight."""


def server_root(url: str) -> str:
    """Return the address of a server without the `/v1` of its OpenAI-compatible paths."""
    return url.rstrip("/").removesuffix("/v1")


def _is_changed(sampling: Sampling) -> bool:
    """Return True if the sampling distribution differs from the model's."""
    return sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
