"""A memory plan: what training holds on each device, before the first byte of it is loaded.

Weights and activations are counted by the trainer's own code, run without data (`step_bytes`), so they follow its
settings.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import replace

from harness1.config import Config, Train
from harness1.models.causal_model import Dtype
from harness1.records import Record
from harness1.rows.file import RowFile
from harness1.training.algorithm import Algorithm
from harness1.training.live_bytes import LINEAR
from harness1.training.micro_batch import by_token_budget
from harness1.training.step_bytes import (
    MicroBatchShape,
    PrefillBytes,
    StepBytes,
    parameter_count,
    prefill_bytes,
    step_bytes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ROOM = 0.06
"""Share of a GPU's memory that a plan leaves free for CUDA's context, the workspaces of its kernels, and fragments. It
is a choice: what they take depends on the driver."""
GATHERED = 2
"""Layers that sharded training holds whole: the one that computes, and the one that is fetched meanwhile."""
CACHE_ROOM = "room for keys and values"
Sampling = Literal["beside", "reserved", "apart", "none"]
"""Where episodes are sampled: in the process that trains; there by vLLM, which reserves a share of the memory; on other
devices; or nowhere."""


class Devices(Record):
    """The devices of a training run."""

    memory: int
    """Bytes of each."""
    kind: Literal["cuda", "cpu"] = "cuda"
    trainers: int = 1
    """Devices that train; several share all weights, gradients and moments."""
    samplers: int = 0
    """Devices that only sample."""
    sampling: Sampling = "none"

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.memory * (1 - ROOM if self.kind == "cuda" else 1))


class Plan(Record):
    """Bytes on one device that trains, and on one that only samples."""

    parameters: int
    """Of the model, without adapters."""
    trained: int
    """Parameters that are trained."""
    batch: MicroBatchShape
    """The largest forward pass."""
    devices: Devices
    held: dict[str, int]
    """What is held throughout."""
    moments: dict[str, int]
    """The most that is held beside it in each part of the work, one at a time."""
    passes: dict[str, int]
    """Of the forward and backward pass: what the layers keep; beside it, logits and their gradients (`logits`), or what
    one layer needs for itself (`working`)."""
    token: int
    """Keys and values of one token on each device where it is sampled; 0 if that is not planned."""
    sampler: dict[str, int]
    """What a device that only samples holds; empty if there is none."""
    needs: int
    """The most at any time on a device that trains."""

    @property
    def fits(self) -> bool:
        """True if it fits with room left."""
        return self.needs <= self.devices.usable and self.sampler.get(CACHE_ROOM, 1) > 0

    @property
    def is_hopeless(self) -> bool:
        """True if the bare sum is more than a device has."""
        return self.needs > self.devices.memory


class MemoryPlanner:
    """Makes memory plans of one model and loss. It remembers what it has counted, so trying settings is quick."""

    def __init__(self, shape: PreTrainedConfig, algorithm: Algorithm) -> None:
        self.shape, self._algorithm = shape, algorithm
        self._steps: dict[bytes, StepBytes] = {}
        self._prefills: dict[tuple[str, int, int], PrefillBytes] = {}
        self._parameters = 0

    def plan(self, config: Config, batch: MicroBatchShape, devices: Devices) -> Plan:
        """Return the plan of a run with the settings `train`, `policy.dtype` and `machine.model`.

        Args:
            batch: the largest forward pass.

        Raises:
            UsageError: transformers cannot build the model, or not compute it without data.
            MissingExtra: torch or transformers is not installed.
        """
        model, context = config.machine.model, config.env.context_window
        step = self.step(config.train, batch, attention_of(config.train))
        held = _held(step, config, devices)
        moments = {"forward and backward pass": step.activations}
        if devices.kind == "cuda":  # there, AdamW makes the divisors of all weights at once
            moments["optimizer step"] = step.trained // devices.trainers
        sampled = PrefillBytes(0, 0, 0)
        if devices.sampling in ("beside", "apart"):
            sampled = self._prefill(config.policy.dtype, model.rows, context)
        token = sampled.cache // (model.rows * context)
        sampler: dict[str, int] = {}
        if devices.sampling == "apart":  # servers keep no more of a layer than its window, and share heads like weights
            sampler = _sampler(sampled, devices, model.memory_share)
            token = int(token * _seen_whole(self.shape)) * sampler["weights"] // sampled.weights
        if devices.sampling == "beside":
            held["weights of the sampler"] = sampled.weights
            held["keys and values"] = sampled.cache + model.cache_tokens * token
            moments["prefill"] = math.ceil(sampled.working * max(1, model.prefill_tokens / context))
        if devices.sampling == "reserved":
            held["vLLM"] = int(model.memory_share * devices.memory)
        self._parameters = self._parameters or parameter_count(self.shape)
        return Plan(
            parameters=self._parameters,
            trained=step.trained // 4,
            batch=batch,
            devices=devices,
            held=held,
            moments=moments,
            passes={"kept": step.kept, "logits": step.logits, "working": step.working},
            token=token,
            sampler=sampler,
            needs=sum(held.values()) + max(moments.values()),
        )

    def activations(self, train: Train, batch: MicroBatchShape) -> dict[str, dict[str, int]]:
        """Return the bytes of a forward and backward pass by attention, with and without checkpointing: `eager` makes
        every score, `linear` is what any fused kernel takes. Raise as `plan`."""
        kinds = {"checkpointing": True, "plain": False}
        return {
            name: {
                kind: self.step(replace(train, checkpointing=on), batch, attention).activations
                for kind, on in kinds.items()
            }
            for name, attention in (("eager", "eager"), ("linear", LINEAR))
        }

    def step(self, train: Train, batch: MicroBatchShape, attention: str = "") -> StepBytes:
        """Return the bytes of a training step; raise as `plan`."""
        key = msgspec.json.encode((train.dtype, train.lora, train.checkpointing, batch, attention))
        if key not in self._steps:
            self._steps[key] = step_bytes(self.shape, train, self._algorithm, batch, attention)
        return self._steps[key]

    def _prefill(self, dtype: Dtype, rows: int, tokens: int) -> PrefillBytes:
        key = dtype, rows, tokens
        if key not in self._prefills:
            self._prefills[key] = prefill_bytes(self.shape, *key)
        return self._prefills[key]


def attention_of(train: Train) -> str:
    """Return the attention to count: a name of transformers, empty for the one that it chooses, or `LINEAR`."""
    plain = {"auto": "", "eager": "eager", "sdpa": "sdpa"}
    return plain.get(train.attention, LINEAR)


def episode_batch(config: Config, length: int = 0, trained: int = 0) -> MicroBatchShape:
    """Return the largest forward pass of rows of episodes.

    Args:
        length: tokens of a row; 0: the context window.
        trained: trained tokens of a row; 0: as many as its turns may write.
    """
    length = length or config.env.context_window
    turns = config.env.rendering.epoch_turns if config.rl.rows == "epoch" else 1
    trained = min(trained or turns * config.env.generation_reserve, length - 1)
    rows = max(1, config.train.micro_tokens // length)
    return MicroBatchShape(rows, length, rows * trained)


def batch_of_rows(rows: RowFile, train: Train) -> MicroBatchShape:
    """Return a forward pass that is at least as large as any over the rows of a dataset."""
    groups = [group[: train.batch_rows] for group in by_token_budget(list(rows.lengths), train.micro_tokens)]
    largest = max(groups, key=lambda group: rows.lengths[group[0]] * len(group))
    trained = max(sum(int(rows.trained[place]) for place in group) for group in groups)
    return MicroBatchShape(len(largest), int(rows.lengths[largest[0]]), trained)


def device_memory(device: str) -> int:
    """Return the bytes of a GPU, or of this machine for `cpu`; 0 if they are not known."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    if device != "cpu" or not set(names) <= set(getattr(os, "sysconf_names", ())):
        return 0
    return max(0, math.prod(map(os.sysconf, names)))


def _held(step: StepBytes, config: Config, devices: Devices) -> dict[str, int]:
    """Return what a device that trains holds of weights, gradients and moments."""
    shards, frozen = devices.trainers, step.frozen > 0 and config.train.lora.rank > 0
    held = {"weights": (step.frozen if frozen else step.frozen + step.trained) // shards}
    if frozen:
        held["adapters"] = step.trained // shards
    held["gradients"] = step.trained // shards
    held["optimizer"] = 2 * step.trained // shards
    if shards > 1:
        held["layers gathered whole"] = step.outside + GATHERED * step.layer
    return held


def _sampler(sampled: PrefillBytes, devices: Devices, share: float) -> dict[str, int]:
    """Return what a server holds on each of its devices: all weights, or a share where they take most of its memory."""
    shards = 1
    while sampled.weights // shards > share * devices.memory / 2 and 2 * shards <= devices.samplers:
        shards *= 2
    weights = sampled.weights // shards
    return {"weights": weights, CACHE_ROOM: int(share * devices.memory) - weights}


def _seen_whole(shape: PreTrainedConfig) -> float:
    """Return the share of layers that see the whole context."""
    kinds = getattr(shape.get_text_config(), "layer_types", None) or ["full_attention"]
    return 1 - kinds.count("sliding_attention") / len(kinds)
