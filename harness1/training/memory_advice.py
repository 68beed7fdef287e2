"""The settings that make a training run fit its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from harness1.config import Config
from harness1.training.memory_plan import Devices, Plan

MOST_TRAINERS = 64
RANK = 32
"""The rank of adapters that is advised, which is also that of the published recipe."""
FEW_ROWS = 4
Make = Callable[[Config, Devices], Plan]
"""Returns the plan of settings on devices."""


class Change(NamedTuple):
    """A setting with its value, or `words` for a change of the devices."""

    name: str = ""
    value: Any = None
    words: str = ""
    devices: dict[str, Any] = {}

    def __str__(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return self.words or f"--set {self.name}={shown}"

    def applied(self, config: Config, devices: Devices) -> tuple[Config, Devices]:
        """Return the settings and the devices with this change."""
        changed = _with(config, self.name.split("."), self.value) if self.name else config
        return changed, replace(devices, **self.devices)


def advice(make: Make, config: Config, devices: Devices) -> tuple[list[Change], Plan] | None:
    """Return the fewest changes, cheapest first, with which a run fits, and its plan; None if none are enough.

    Raises:
        UsageError, MissingExtra: as `make`.
    """
    needed: list[Change] = []
    for change in _changes(config, devices):
        needed.append(change)
        if _plan(make, config, devices, needed).fits:
            break
    else:
        return None
    for change in reversed(list(needed)):  # what costs most first
        fewer = [each for each in needed if each is not change]
        if fewer and _plan(make, config, devices, fewer).fits:
            needed = fewer
    return needed, _plan(make, config, devices, needed)


def _plan(make: Make, config: Config, devices: Devices, changes: Sequence[Change]) -> Plan:
    for change in changes:
        config, devices = change.applied(config, devices)
    return make(config, devices)


def _changes(config: Config, devices: Devices) -> Iterator[Change]:
    """Yield what lowers memory, in the order of what it costs: first what changes no result."""
    train, model = config.train, config.machine.model
    samples = devices.sampling in ("beside", "apart")
    if not train.checkpointing:
        yield Change("train.checkpointing", True)
    if train.attention in ("auto", "eager") and devices.kind == "cuda":
        yield Change("train.attention", "flex_attention")  # has all features of attention, and is part of torch
    if train.micro_tokens > config.env.context_window:
        yield Change("train.micro_tokens", config.env.context_window)
    if train.dtype != "bfloat16":
        yield Change("train.dtype", "bfloat16")
    if samples and config.policy.dtype != "bfloat16":
        yield Change("policy.dtype", "bfloat16")
    if devices.sampling == "beside":
        if model.cache_tokens:
            yield Change("machine.model.cache_tokens", 0)
        if model.rows > FEW_ROWS:
            yield Change("machine.model.rows", FEW_ROWS)
    if not train.lora.rank:
        yield Change("train.lora.rank", RANK)
    if devices.sampling in ("beside", "reserved"):
        words = "sample on another GPU: --model vllm:MODEL@URL"
        yield Change(words=words, devices={"sampling": "apart", "samplers": max(1, devices.samplers)})
    trainers = devices.trainers
    while devices.kind == "cuda" and trainers < MOST_TRAINERS:
        trainers *= 2
        yield Change(
            words=f"shard over {trainers} GPUs: torchrun --nproc-per-node {trainers}", devices={"trainers": trainers}
        )


def _with(settings: Any, path: Sequence[str], value: Any) -> Any:
    """Return settings with another value at a path of names."""
    name, *rest = path
    return replace(settings, **{name: _with(getattr(settings, name), rest, value) if rest else value})
