"""Define what a training loop needs of whatever holds the weights in training."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from harness1.config import Config, Train
from harness1.errors import UsageError
from harness1.models.backend import Backend
from harness1.models.checkpoint import Checkpoint
from harness1.rows import TrainRow
from harness1.training.algorithm import Algorithm
from harness1.training.process_group import ALONE, ProcessGroup, Unanimous, delay_interrupt
from harness1.training.saving import write_model
from harness1.training.trainable import load_trainable
from harness1.training.trainer import OnTokens, Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from harness1.models.adapters import Weights

Deliver = Callable[["Weights", int], Awaitable[None]]  # gives weights and version to a sampler, as `Rollouts.publish`


class Engine(Protocol):
    """A model in training with its optimizer and its loss. Of several processes, the leading one calls it."""

    @property
    def step_count(self) -> int: ...

    def step(self, rows: Sequence[TrainRow], on_tokens: OnTokens = lambda _done, _of: None) -> dict[str, float]:
        """Take one optimizer step and return the values to log; raise Diverged if loss or gradient is not finite."""

    def loss(self, rows: Sequence[TrainRow]) -> float:
        """Return the loss of rows under the present weights."""

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Return the natural log probabilities of the trained tokens of each row, in order."""

    async def publish(self, version: int, deliver: Deliver) -> None:
        """Have the present weights sampled from now on, under a version; a service tells its own sampler."""

    def save(self, root: Path) -> str:
        """Save all that the next step depends on; return its name: of a folder within `root`, or a service's."""

    def load(self, root: Path, name: str) -> None:
        """Continue from a save, and forget the others; raise UsageError if it is lost or damaged."""

    def write(self, folder: Path, card: Checkpoint) -> Checkpoint:
        """Write the present weights as a checkpoint; return its card as written. Raise UsageError if that fails."""


class TrainingService(NamedTuple):
    """What trains in place of this machine."""

    sampler: Backend  # samples the weights that the engine published last
    open_engine: Callable[[Path, Algorithm, Config, int], Engine]  # by base, loss, settings and steps of the schedule


@dataclass(frozen=True)
class TrainerJob:
    """What a process needs to open its part of a trainer. Of several processes, each has the device of the type of
    `device` with its number; `threads` are torch's in each, and 0 leaves them unchanged."""

    base: Path
    algorithm: Algorithm
    train: Train
    steps: int
    device: str = "cpu"
    threads: int = 0


def open_local_engine(job: TrainerJob, group: ProcessGroup = ALONE) -> LocalEngine:
    """Return the engine of a process that trains alone, leads a group that follows, or follows. Raise UsageError if the
    model, the settings or the device do not fit; MissingExtra without torch or transformers."""
    with _together(group, job):
        place, fault = job.device if group.size == 1 else "cpu", ""  # `shard` moves it on, block by block
        group.kind = job.device.partition(":")[0]
        try:
            model = load_trainable(job.base, job.train, place, job.threads)
        except UsageError as error:
            fault = str(error)
        group.agree(fault)
        try:
            return LocalEngine(job, model, group)
        except UsageError as error:
            raise Unanimous(str(error)) from error


@contextmanager
def leading(group: ProcessGroup) -> Iterator[None]:
    """Lead a group: its other processes must `follow`, and end when this does."""
    try:
        yield
    finally:
        if not group.broken:
            with _loss_ignored():
                group.broadcast(None)


def follow(group: ProcessGroup) -> None:
    """Repeat the calls of the leading process to its engine until it ends. An interrupt is left to that process, and so
    is what all processes meet, such as a full disk: it says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine: LocalEngine | None = None
    with _loss_ignored():
        while (order := group.broadcast(None)) is not None:
            with suppress(Unanimous):
                if isinstance(order, TrainerJob):
                    engine = open_local_engine(order, group)
                else:
                    name, *arguments = order
                    getattr(engine, name)(*arguments)


@contextmanager
def _together(group: ProcessGroup, order: Any) -> Iterator[None]:
    """In the leading process, have the followers do what is done within; an interrupt is raised when all have."""
    if group.size == 1 or not group.leads:
        yield
        return
    with delay_interrupt():
        try:
            group.broadcast(order)
            yield
        except BaseException as error:
            group.broken = not isinstance(error, Unanimous)
            if isinstance(error, RuntimeError) and _is_lost(error):
                raise UsageError("another process of this training run has ended; its own message says why") from error
            raise


@contextmanager
def _loss_ignored() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not _is_lost(error):  # it said itself why it ended
            raise


def _is_lost(error: RuntimeError) -> bool:
    import torch.distributed

    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


class LocalEngine(Trainer):
    """The `Engine` of our own trainer. If it leads a group, its followers repeat each call."""

    def __init__(self, job: TrainerJob, model: PreTrainedModel, group: ProcessGroup) -> None:
        super().__init__(model, job.algorithm, job.train, job.steps, group)
        self._base = job.base

    def step(self, rows: Sequence[TrainRow], on_tokens: OnTokens = lambda _done, _of: None) -> dict[str, float]:
        with _together(self.group, ("step", rows)):
            return super().step(rows, on_tokens)

    def loss(self, rows: Sequence[TrainRow]) -> float:
        with _together(self.group, ("loss", rows)):
            return super().loss(rows)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        with _together(self.group, ("logprobs", rows)):
            return super().logprobs(rows)

    def weights(self) -> Weights:
        with _together(self.group, ("weights",)):
            return super().weights()

    def save(self, root: Path) -> str:
        with _together(self.group, ("save", root)):
            return super().save(root)

    def load(self, root: Path, name: str) -> None:
        with _together(self.group, ("load", root, name)):
            super().load(root, name)

    async def publish(self, version: int, deliver: Deliver) -> None:
        await deliver(self.weights(), version)

    def write(self, folder: Path, card: Checkpoint) -> Checkpoint:
        return write_model(folder, self.model, self.weights(), self._base, card)


OpenEngine = Callable[[TrainerJob, ProcessGroup], Engine]  # of the leading process; `open_local_engine` or a service's


def open_service_engine(service: TrainingService, config: Config, job: TrainerJob, group: ProcessGroup) -> Engine:
    """Return the engine of a training service."""
    return service.open_engine(job.base, job.algorithm, config, job.steps)
