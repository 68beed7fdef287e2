"""Let a sampler and the trainer use the same GPUs in turns: the sampler sleeps while the trainer steps.

With `rl.staleness` above 0 episodes go on after a step where they were, so that the trainer need not wait for the
longest of a batch (multiplexing, as in ROLL, of a device that cannot be divided). Searches and judges go on meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial

from harness1.config import Config
from harness1.errors import ConfigError
from harness1.models.backend import Backend, Sleeper

Undisturbed = Callable[[], AbstractAsyncContextManager[None]]
"""Gives a context in which the trainer has the devices for itself."""


def undisturbed(sampler: Backend, config: Config, device: str, processes: int = 1) -> Undisturbed:
    """Return what a training run steps in: with `machine.model.sleep` the sampler sleeps there.

    Args:
        device: that of the trainer.
        processes: those that train together.

    Raises:
        ConfigError: the sampler cannot sleep, or the trainer does not own all devices of it.
    """
    if not config.machine.model.sleep:
        return nullcontext
    if not isinstance(sampler, Sleeper):
        raise ConfigError("machine.model.sleep is for vllm:PATH and vllm:MODEL@URL: no other sampler can sleep")
    if config.machine.fleet.workers:
        raise ConfigError("machine.model.sleep is for one sampler: the workers of a fleet have devices of their own")
    if processes > 1:
        raise ConfigError("machine.model.sleep is for training in one process: give several GPUs of their own")
    return partial(_asleep, sampler, device)


@asynccontextmanager
async def _asleep(sampler: Sleeper, device: str) -> AsyncIterator[None]:
    async with sampler.asleep():
        try:
            yield
        finally:
            if device.startswith("cuda"):
                import torch

                torch.cuda.empty_cache()  # torch keeps what it has freed, and the sampler needs it to wake
