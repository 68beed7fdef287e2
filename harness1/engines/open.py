"""Open what trains in place of this machine, by its name after `--engine`; a plugin names an `Opener`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from harness1.config import Config
from harness1.engines.engine import TrainingService
from harness1.engines.tinker import open_tinker
from harness1.errors import UsageError
from harness1.models.backend import Backend
from harness1.plain import meant
from harness1.plugins import find_plugin, open_added, plugin_names
from harness1.training.algorithm import NegativeLogLikelihood

Opener = Callable[[str, Path, Config, int], TrainingService]
"""Opens a service by what follows its prefix, the folder of the model to begin with, the settings, and the number of
processes that train; it raises UsageError for what it cannot do."""
TINKER = "tinker"


def open_service(name: str, base: Path, config: Config, processes: int = 1) -> TrainingService:
    """Open a service by `tinker:MODEL`, `tinker:MODEL@URL`, or the prefix of a plugin, to train the model in `base`.
    Its sampler has no weights before the first `publish`. UsageError if that cannot be done."""
    prefix, _, rest = name.partition(":")
    added: Opener | None = find_plugin("engines", prefix, (TINKER,))
    if added is not None:
        service: TrainingService = open_added("engines", prefix, added, rest, base, config, processes)
        return service
    if prefix != TINKER and (others := plugin_names("engines")):
        raise UsageError(f"there is no engine {prefix!r}; choose {', '.join((TINKER, *others))}{meant(prefix, others)}")
    return open_tinker(name, base, config, processes)


def open_start(name: str, base: Path, config: Config) -> Backend:
    """Return a sampler of the weights that a training would begin with, as version 0; new adapters change nothing."""

    async def refuse(state: object, version: int) -> None:
        raise UsageError("a training service samples from its own weights, and has none to deliver")

    service = open_service(name, base, config)
    engine = service.open_engine(base, NegativeLogLikelihood(), config, 1)
    asyncio.run(engine.publish(0, refuse))
    return service.sampler
