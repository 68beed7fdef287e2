"""Train in this process, or lead the processes of a group: a model of transformers under our own trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness1.engines.engine import Deliver, OnTokens, ignore_tokens
from harness1.models.checkpoint import Checkpoint
from harness1.rows.row import TrainRow
from harness1.training.followers import TrainerJob, open_trainer
from harness1.training.process_group import ALONE, ProcessGroup
from harness1.training.saving import write_model


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
