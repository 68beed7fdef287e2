"""Episodes played in this process, with a model here or behind a server."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness1.config import Config
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, play_staged
from harness1.errors import ConfigError, UsageError
from harness1.models.backend import Backend
from harness1.models.files.fetch import resolve_model
from harness1.models.open import ModelSpec, open_backend
from harness1.models.transformers.backend import TransformersBackend
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode
from harness1.rl.weight_folder import write_version

if TYPE_CHECKING:
    from torch import Tensor


class LocalRollouts:
    """`Rollouts` by the staged runner, over one policy.

    Args:
        benches: what `EpisodeJob.setup` names; their `policy` is not read.
        base: the folder of the model, and
        versions: where its versions are written, for a backend that loads weights by path.
    """

    def __init__(self, setups: Sequence[EpisodeSetup], policy: LanguageModelPolicy, base: Path, versions: Path) -> None:
        self.setups, self.policy, self._base, self._versions = setups, policy, base, versions

    async def run(
        self, jobs: Iterable[EpisodeJob] | AsyncIterable[EpisodeJob], on_episode: Callable[[Episode], None]
    ) -> None:
        await play_staged(self.setups, self.policy, jobs, on_episode)

    async def publish(self, state: Mapping[str, Tensor], version: int) -> None:
        await publish_to(self.policy.model, state, version, self._base, self._versions)


async def publish_to(backend: Backend, state: Mapping[str, Tensor], version: int, base: Path, versions: Path) -> None:
    """Give weights to a backend: by memory to a model in this process, by path to others."""
    if isinstance(backend, TransformersBackend):
        await backend.load_state(state, version)
    else:
        await backend.load_weights(write_version(versions, base, state, version), version)


def open_rollouts(setups: Sequence[EpisodeSetup], spec: str, base: Path, versions: Path) -> LocalRollouts:
    """Rollouts with a policy of their own: what a worker on another machine opens. Its versions are in a folder of its
    own, for workers do not wait for each other.

    Raises:
        UsageError, ConfigError, MissingExtra: as `open_policy_to_train`.
    """
    own = versions / f"{socket.gethostname()}-{os.getpid()}"
    return LocalRollouts(setups, open_policy_to_train(spec, setups[0].config), base, own)


def open_policy_to_train(spec: str, config: Config) -> LanguageModelPolicy:
    """The policy that is to be trained. It is sampled as it is, for what is sampled is what is trained.

    Raises:
        UsageError: `spec` names no model whose tokens are sampled by its ids.
        ConfigError: the settings of sampling are none to train by.
    """
    asked, settings = ModelSpec.read(spec), config.policy
    if asked.kind == "openai":
        raise UsageError(f"{spec} gives no token ids: train hf:PATH, vllm:PATH, vllm:MODEL@URL or sglang:MODEL@URL")
    if (settings.temperature, settings.top_p, settings.top_k, settings.constrained) != (1.0, 1.0, 0, False):
        raise ConfigError(
            "reinforcement learning samples from the policy itself: set policy.temperature=1, policy.top_p=1,"
            " policy.top_k=0 and policy.constrained=false"
        )
    model, chat = open_backend(asked, config)
    return LanguageModelPolicy(model, chat, config.env.generation_reserve, settings, spec)


def base_folder(spec: str) -> Path:
    """Where the weights lie that a policy begins with.

    Raises:
        UsageError: there is no such model here.
    """
    return resolve_model(ModelSpec.read(spec).model)
