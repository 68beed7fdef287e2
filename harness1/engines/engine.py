"""Define what a training loop needs of whatever holds the weights in training."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from harness1.config import Config
from harness1.models.backend import Backend
from harness1.models.checkpoint import Checkpoint
from harness1.rows.row import TrainRow
from harness1.training.algorithm import Algorithm
from harness1.training.followers import TrainerJob, open_trainer
from harness1.training.process_group import ALONE, ProcessGroup
from harness1.training.saving import write_model

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


Deliver = Callable[["Weights", int], Awaitable[None]]
"""Gives weights and their version to what samples in this process, such as `Rollouts.publish`."""
OnTokens = Callable[[int, int], None]
"""Called within a step with the tokens done and those of all its rows."""


def ignore_tokens(done: int, of: int) -> None:
    """Do nothing: the `OnTokens` of a caller who shows no progress within a step."""


class Engine(Protocol):
    """A model in training with its optimizer and its loss. Of several processes, the leading one calls it."""

    @property
    def step_count(self) -> int:
        """Optimizer steps taken so far."""
        ...

    def step(self, rows: Sequence[TrainRow], on_tokens: OnTokens = ignore_tokens) -> dict[str, float]:
        """Take one optimizer step and return the values to log, `loss` and `trained_tokens` among them.

        Raises:
            Diverged: the loss or the gradient is not finite.
            InfrastructureFault: a service failed.
        """
        ...

    def loss(self, rows: Sequence[TrainRow], saved: Path | None = None) -> float:
        """Return the loss of rows under the present weights.

        Args:
            saved: a folder that `write` wrote: its weights, loaded again, take the place of the present ones for this
                call. A service, which keeps them itself, measures the present ones.
        """
        ...

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Return the natural log probabilities of the trained tokens of each row, in order."""
        ...

    async def publish(self, version: int, deliver: Deliver) -> None:
        """Have the present weights sampled from now on, under a version.

        Args:
            deliver: used by engines whose weights are in this process; others tell their own sampler.

        Raises:
            InfrastructureFault: the weights could not be delivered.
        """
        ...

    def save(self, root: Path) -> str:
        """Save all that the next step depends on, and return a name: of a folder within `root`, or that under which a
        service keeps it. Of earlier saves only the last need be kept."""
        ...

    def load(self, root: Path, name: str) -> None:
        """Continue from a save, and forget the others; raise UsageError if it is lost or damaged."""
        ...

    def write(self, folder: Path, card: Checkpoint) -> Checkpoint:
        """Write the present weights as a checkpoint, and return its card as written.

        Raises:
            UsageError: the disk is full, or the folder cannot be written.
        """
        ...


class TrainingService(NamedTuple):
    """What trains in place of this machine."""

    sampler: Backend
    """Samples the weights that the engine published last."""
    open_engine: Callable[[Path, Algorithm, Config, int], Engine]
    """Returns the engine for a base folder, a loss, the settings, and the number of steps of the rate's schedule."""


class LocalEngine:
    """The `Engine` of our own trainer, with which other engines are compared.

    Raises:
        UsageError, MissingExtra: as `open_trainer`.
    """

    def __init__(self, job: TrainerJob, group: ProcessGroup = ALONE) -> None:
        self.trainer = open_trainer(job, group)
        self._base = job.base

    @property
    def step_count(self) -> int:
        return self.trainer.step_count

    def step(self, rows: Sequence[TrainRow], on_tokens: OnTokens = ignore_tokens) -> dict[str, float]:
        return self.trainer.step(rows, on_tokens)

    def loss(self, rows: Sequence[TrainRow], saved: Path | None = None) -> float:
        return self.trainer.loss(rows, saved)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        return self.trainer.logprobs(rows)

    async def publish(self, version: int, deliver: Deliver) -> None:
        await deliver(self.trainer.weights(), version)

    def save(self, root: Path) -> str:
        return self.trainer.save(root)

    def load(self, root: Path, name: str) -> None:
        self.trainer.load(root, name)

    def write(self, folder: Path, card: Checkpoint) -> Checkpoint:
        return write_model(folder, self.trainer.model, self.trainer.weights(), self._base, card)
