"""Define groups of episodes, and the interface that plays them."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness1.config import Config
from harness1.episodes.jobs import EpisodeSetup, Jobs, OnEpisode, play_in_loop
from harness1.errors import ConfigError, InfrastructureFault, UsageError
from harness1.model_folder import base_folder
from harness1.models.adapters import Adapters, write_adapters
from harness1.models.backend import Backend, Sleeper, WeightLoader
from harness1.models.open import format_at, open_backend
from harness1.models.spec import ModelSpec
from harness1.models.transformers_backend import TransformersBackend
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode, Record
from harness1.training.saving import copy_beside_weights

if TYPE_CHECKING:
    from torch import Tensor

    from harness1.models.adapters import Weights


class EpisodeGroup(Record):
    """The finished episodes of one task, ordered by `sample_idx`; their rewards are compared only with each other."""

    index: int  # from 0, in the order in which groups are begun
    version: int  # of the weights when the group was begun
    episodes: tuple[Episode, ...]


class Rollouts(Protocol):
    """Plays episodes with the weights published last. Several calls of `run` may be in progress at once."""

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        """Play all jobs. `on_episode` is called in the event loop, with episodes that are scored or that the
        infrastructure broke (`Status.INFRA_ERROR`); any other error is raised."""
        ...

    async def publish(self, state: Weights, version: int) -> None:
        """Switch to new adapters, or a whole state dictionary: calls in flight end with the old weights; later calls
        are sampled with the new ones and recorded under `version`. The weights must not change until this returns.
        Raise InfrastructureFault if they could not be delivered."""
        ...


KEPT = 2  # versions kept on disk, the last ones: an engine may still be reading the one before


class LocalRollouts:
    """`Rollouts` in stages, of one policy, in the setups that `EpisodeJob.setup` counts. `base` is the folder of the
    model, and `versions` that of its versions, for a backend that loads weights by path."""

    def __init__(self, setups: Sequence[EpisodeSetup], policy: LanguageModelPolicy, base: Path, versions: Path) -> None:
        self.setups, self.policy, self._base, self._versions = setups, policy, base, versions

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        await play_in_loop(self.setups, self.policy, jobs, on_episode)

    async def publish(self, state: Weights, version: int) -> None:
        await publish_to(self.policy.model, state, version, self._base, self._versions)


async def publish_to(backend: Backend, state: Weights, version: int, base: Path, versions: Path) -> None:
    """Give adapters or whole weights to a backend: in memory if the model is in this process, otherwise by path."""
    if isinstance(backend, TransformersBackend):
        await backend.load_state(state, version)
    elif isinstance(backend, WeightLoader):
        await backend.load_weights(write_version(versions, base, state, version), version)
    else:
        raise UsageError(f"{type(backend).__name__} takes no weights: whoever trains gives them to it")


def write_version(root: Path, base: Path, state: Weights, version: int) -> Path:
    """Write a version of a model beside the previous one, remove all others, and return its folder. Later versions are
    those of a training that was cut short: it goes on from an earlier state. The other files of `base` are copied
    beside whole weights. Raise InfrastructureFault if there is no room, or the folder cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = root / f"version-{version}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(state, Adapters):
            write_adapters(folder, state, base_folder(base))
        else:
            copy_beside_weights(base, folder)
            save_file(_untie(state), folder / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise InfrastructureFault(f"version {version} of the weights cannot be written to {root}: {error}") from error
    for other in root.glob("version-*"):
        if not version - KEPT < int(other.name.partition("-")[2]) <= version:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _untie(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep each storage once: of names that share one, as a tied head does, readers need only the first."""
    seen: set[int] = set()
    kept = {}
    for name, value in state.items():
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            kept[name] = value.detach().cpu().contiguous()
    return kept


def open_rollouts(setups: Sequence[EpisodeSetup], spec: str, base: Path, versions: Path) -> LocalRollouts:
    """Open rollouts with a policy of their own (`open_policy_to_train`), in a worker on any machine. The worker writes
    versions into its own folder, because workers do not wait for each other."""
    own = versions / f"{socket.gethostname()}-{os.getpid()}"
    return LocalRollouts(setups, open_policy_to_train(spec, setups[0].config), base, own)


def open_policy_to_train(spec: str, config: Config, sampler: Backend | None = None) -> LanguageModelPolicy:
    """Open the policy to be trained. It must be sampled from its unchanged distribution, which is the one trained. A
    `sampler` samples in place of the model, of which only the tokenizer is needed then. Raise UsageError if `spec`
    names no model that gives token ids; ConfigError if the sampling settings change the distribution."""
    asked, settings = ModelSpec.read(spec), config.policy
    if asked.kind == "openai":
        raise UsageError(f"{spec} gives no token ids: train hf:PATH, vllm:PATH, vllm:MODEL@URL or sglang:MODEL@URL")
    if (settings.temperature, settings.constrained) != (1.0, False):
        needed = "set policy.temperature=1 and policy.constrained=false"
        raise ConfigError(f"reinforcement learning samples from the policy itself: {needed}")
    if sampler is not None:
        model, chat = sampler, format_at(asked.model, config)
    else:
        model, chat = open_backend(asked, config, config.train.lora.rank)
    return LanguageModelPolicy(model, chat, config.env.generation_reserve, settings, spec)


Undisturbed = Callable[[], AbstractAsyncContextManager[None]]
"""Gives a context in which the trainer has the devices for itself."""


def reserve_devices(sampler: Backend, config: Config, device: str, processes: int = 1) -> Undisturbed:
    """Return what a training run of some processes on a device steps in: with `machine.model.sleep` the sampler sleeps
    there; raise ConfigError if it cannot sleep, or the trainer does not own all devices of it."""
    if not config.machine.model.sleep:
        return nullcontext
    if not isinstance(sampler, Sleeper):
        raise ConfigError("machine.model.sleep is for vllm:PATH and vllm:MODEL@URL: no other sampler can sleep")
    if config.machine.fleet.workers:
        raise ConfigError("machine.model.sleep is for one sampler: the workers of a fleet have devices of their own")
    if processes > 1:
        raise ConfigError("machine.model.sleep is for training in one process: give several GPUs of their own")

    @asynccontextmanager
    async def let_sleep() -> AsyncIterator[None]:
        async with sampler.asleep():
            try:
                yield
            finally:
                if device.startswith("cuda"):
                    import torch

                    torch.cuda.empty_cache()  # torch keeps what it has freed, and the sampler needs it to wake

    return let_sleep
