"""Sample from the weights that a service trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness1.engines.service import Service
from harness1.errors import InfrastructureFault, UsageError
from harness1.hashing import digest
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.sampled import EngineOutput, checked
from harness1.models.sampler import check_sampling
from harness1.records import Sampling


class TinkerBackend:
    """A `Backend` over the sampling client of a service. Its versions are counted here: each set of weights has a
    client of its own, so calls in flight end with the weights they began with.

    Args:
        begun: the remote name of the weights that training begins with; empty: the untrained model.
    """

    def __init__(self, service: Service, begun: str = "") -> None:
        self.hash = digest(["tinker", service.model, begun])
        self.service = service
        self._current: tuple[Any, int] | None = None

    @property
    def version(self) -> int:
        return 0 if self._current is None else self._current[1]

    def switch(self, client: Any, version: int) -> None:
        """Sample later calls with another client, under a version."""
        self._current = client, version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        check_sampling(sampling)
        if grammar is not None:
            raise UsageError("a training service has no grammars: set policy.constrained=false")
        if sampling.temperature not in (0.0, 1.0) or sampling.top_p < 1 or sampling.top_k > 0:
            raise UsageError("a training service samples at temperature 1 or 0: set policy.top_p=1 and policy.top_k=0")
        if self._current is None:
            raise InfrastructureFault("no weights were published to the sampler yet")
        (client, version), sdk = self._current, self.service.sdk
        prompt = sdk.ModelInput.from_ints(list(prompt_ids))
        params = sdk.SamplingParams(
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop=list(sampling.stop_ids),
            temperature=sampling.temperature,
            top_k=-1,
            top_p=1.0,
        )
        answer = await self.service.ask(lambda: client.sample(prompt, 1, params))
        sequence = answer.sequences[0]
        ids = list(sequence.tokens)
        stopped_by = ids[-1] if ids and ids[-1] in sampling.stop_ids else None
        found = EngineOutput(ids, sequence.logprobs, str(sequence.stop_reason), stopped_by)
        return checked(found, sampling, version)

    async def load_weights(self, folder: Path, version: int) -> None:
        raise UsageError("a training service samples from its own weights, not from those of a folder")

    async def load_adapter(self, folder: Path, version: int) -> None:
        await self.load_weights(folder, version)
