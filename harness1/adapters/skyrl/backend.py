"""The engines of SkyRL's trainer as a backend: token ids in, sampled ids and log probabilities out (SkyRL 0.4.0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.hashing import digest
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.sampled import EngineOutput, checked
from harness1.records import Sampling


class InferenceClient(Protocol):
    """What is used of SkyRL's `RemoteInferenceClient`."""

    @property
    def weight_version(self) -> int:
        """The number of times that new weights were loaded."""
        ...

    async def generate(self, input_batch: Any, model: str | None = None) -> Mapping[str, Any]:
        """Sample one output for each prompt."""
        ...

    async def finish_session(self, session_id: str) -> None:
        """Free the place that a trajectory holds."""
        ...


class SkyRLBackend:
    """A `Backend` over SkyRL's client, for one trajectory, whose calls go to the same engine.

    Args:
        name: the path or name of the model.
        model: the name that the engines have for the policy: that of an adapter, or None.
        session: the trajectory.
    """

    def __init__(self, client: InferenceClient, name: str, model: str | None = None, session: str = "") -> None:
        self._client, self._model, self._session = client, model, session
        self.hash = digest(["skyrl", name])

    @property
    def version(self) -> int:
        return self._client.weight_version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        """Do as `Backend.generate`. The version at the end differs if weights were loaded meanwhile.

        Raises:
            InfrastructureFault, UsageError: as `Backend.generate`; UsageError also for sampling whose log
                probabilities these engines do not give: any but temperature 1 and temperature 0.
        """
        plain = sampling.temperature in (0.0, 1.0) and (sampling.top_p, sampling.top_k) == (1.0, 0)
        if grammar is not None or not plain:
            raise UsageError("SkyRL's engines sample here at temperature 1 or 0, without top_p, top_k and grammar")
        begun = self.version
        answer = await self._ask(prompt_ids, sampling, begun)
        try:
            (ids,), (finish,), (logprobs,) = (
                answer["response_ids"], answer["stop_reasons"], answer["response_logprobs"] or [None],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise InfrastructureFault(f"SkyRL's engine gave no single output: {error}") from error
        # The engines do not say which token stopped an output; only the given ones can.
        stopped_by = ids[-1] if ids and ids[-1] in sampling.stop_ids else None
        output = checked(EngineOutput(ids, logprobs, finish, stopped_by), sampling, begun)
        return msgspec.structs.replace(output, version_end=self.version)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Refuse: SkyRL's trainer gives weights to its engines itself."""
        raise UsageError("SkyRL's trainer loads the weights of its engines itself")

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Refuse, as `load_weights` does."""
        await self.load_weights(folder, version)

    async def close(self) -> None:
        """End the trajectory."""
        await self._client.finish_session(self._session)

    async def _ask(self, prompt_ids: Sequence[int], sampling: Sampling, version: int) -> Mapping[str, Any]:
        with optional("serve", "aiohttp"):
            from aiohttp import ClientError, ClientResponseError
        asked = {
            "prompt_token_ids": [list(prompt_ids)],
            "sampling_params": _params(sampling),
            "session_ids": [self._session],
            # Cached prefixes are of one version of the weights.
            "cache_salt": str(version),
        }
        try:
            return await self._client.generate(asked, model=self._model)
        except ClientResponseError as error:
            if 400 <= error.status < 500:
                raise UsageError(f"SkyRL's engine refused a call: {error.message}") from error
            raise InfrastructureFault(f"SkyRL's engine failed: {error.status} {error.message}") from error
        except (ClientError, OSError, TimeoutError) as error:
            raise InfrastructureFault(f"SkyRL's engine failed: {error}") from error


def _params(sampling: Sampling) -> dict[str, Any]:
    """Return vLLM's parameters: only the given stop tokens end an output."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "logprobs": 1,
    }
