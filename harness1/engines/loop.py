"""The loop of every training: validate, update, save, until the last update. An update is one optimizer step of
fine-tuning, or the steps of a batch of reinforcement learning; both end in `Engine.step`."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Train
from harness1.engines.engine import Engine
from harness1.errors import UsageError
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.records import Record
from harness1.training.log import VALIDATION_PREFIX, StepListener, Trackers, TrainLog
from harness1.training.process_group import delay_interrupt
from harness1.training.saving import load_state, write_state
from harness1.training.trainer import Diverged

STATE = Path("state", "state.pt")
SAVE_MINUTES = 10.0  # minutes after which an update saves a state even if `train.save_every` does not ask for one
HIGHER = {"nll": False, "valid": True, "tool_agreement": True, "curated_recall": True, "reward": True}
"""The metrics that can choose the best checkpoint; True if higher values are better."""
OF_EPISODES = ("curated_recall", "reward")  # those of whole episodes, which the infrastructure may break


@dataclass
class Best:
    """The best value of a metric so far."""

    metric: str
    value: float | None = None

    def take(self, metrics: dict[str, float]) -> bool:
        """Take in a validation; return True if it is the best so far, and False if it lacks the metric."""
        value, best = metrics.get(self.metric), self.value
        if value is None or isnan(value):
            return False
        if best is None or (value > best if HIGHER[self.metric] else value < best):
            self.value = value
            return True
        return False


class LoopState(Record):
    """What is saved between updates."""

    trainer: str  # the name of the engine's save
    best: Best
    card: Checkpoint
    validated: int = -1
    looked: int = -1  # what earlier versions of reinforcement learning called `validated`
    version: int = -1  # updates done; -1 in states of earlier versions of fine-tuning, which counted the engine's steps
    buffer: Any = None  # that of reinforcement learning


class TrainingLoop(ABC):
    """A training under way, of so many updates (`unit` is the word for one), which resumes from the state in `out`.
    After the reading `ends_at` of `time.monotonic` no other update is begun, as if all were done."""

    def __init__(
        self,
        engine: Engine,
        out: Path,
        card: Checkpoint,
        train: Train,
        updates: int,
        on_step: StepListener,
        unit: str = "step",
        ends_at: float = math.inf,
    ) -> None:
        self.engine, self.out, self.card, self.settings = engine, out, card, train
        self.updates, self._on_step, self._unit, self._ends_at = updates, on_step, unit, ends_at
        self.best = Best(train.watch.metric)
        self.version = 0  # updates done, which is also the version of the weights
        self.validated = -1  # the version that was validated last; -1 if none was
        self.log: TrainLog
        state = load_state(out / STATE, LoopState)
        if state is not None:
            engine.load((out / STATE).parent, state.trainer)
            self.best, self.card = state.best, state.card
            self.version = state.version if state.version >= 0 else engine.step_count
            self.validated = max(state.validated, state.looked)
        self.resumed = state
        self.begun = self.version  # the version that this process began with
        self._saved_at = time.monotonic()

    @abstractmethod
    async def update(self) -> None:
        """Take the next optimizer steps, count them, and report. An interrupt that comes meanwhile is raised after."""

    @abstractmethod
    async def measure(self) -> dict[str, float]:
        """Return the metrics of a validation, `faults` among them if there were any; empty if nothing is held out."""

    def buffer_state(self) -> Any:
        return None

    def train(self) -> Checkpoint:
        """Train to the end, and return the card of the checkpoint: the best by `train.watch.metric`, or the last. An
        interrupt waits for the update at work; the state is saved. Raise UsageError if the time was up before the first
        update; Diverged if a loss is not finite: there is a checkpoint nevertheless."""
        self._on_step(self.version, self.updates, {})
        try:
            asyncio.run(self.run())
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"the same command continues after {self._unit} {self.version}")
            raise
        except Diverged:
            self._ensure_checkpoint()
            raise
        self._ensure_checkpoint()
        return self.card

    def open_log(self, trackers: Trackers) -> TrainLog:
        """Open the log after the lines of the updates that are done; none of them if the start was not validated."""
        return TrainLog(self.out, self.version if self.validated >= 0 else -1, trackers)

    async def run(self) -> None:
        """Validate and update to the last update, or for the time given. An interrupt has the state saved."""
        watch = self.settings.watch
        try:
            while True:
                late = time.monotonic() >= self._ends_at
                if late and not self.version:
                    raise UsageError(f"the time was up before the first {self._unit} was trained: give more --minutes")
                ends = late or self.version == self.updates
                if self.validated < self.version and (ends or not self.version or is_due(self.version, watch.every)):
                    await self.validate()
                waited = 0 < 60 * SAVE_MINUTES <= time.monotonic() - self._saved_at
                due = waited or is_due(self.version, self.settings.save_every)
                if ends or (self.version > self.begun and due):
                    self.save()
                if ends:
                    return
                await asyncio.sleep(0)  # an interrupt of a validation that never waited ends here
                await self.update()
        except (asyncio.CancelledError, KeyboardInterrupt):
            with delay_interrupt():
                self.save()
            raise

    async def validate(self) -> None:
        """Validate, and write a checkpoint if it is the best so far: never of the weights that training began with; and
        a mean over fewer tasks, where faults broke some, is another measure, which is only logged."""
        metrics = await self.measure()
        with delay_interrupt():
            self.validated = self.version
            if not metrics:
                return
            self.report({f"{VALIDATION_PREFIX}{name}": value for name, value in metrics.items()})
            comparable = "faults" not in metrics or self.best.metric not in OF_EPISODES
            if self.version and comparable and self.best.take(metrics):
                self.write(metrics)

    def report(self, values: dict[str, float]) -> None:
        self.log.write(self.version, values)
        self._on_step(self.version, self.updates, values)

    def write(self, metrics: dict[str, float]) -> None:
        self.card = self.engine.write(self.out, msgspec.structs.replace(self.card, step=self.version, metrics=metrics))

    def save(self) -> None:
        """Save the state."""
        name = self.engine.save((self.out / STATE).parent)
        state = LoopState(name, self.best, self.card, self.validated, -1, self.version, self.buffer_state())
        write_state(self.out / STATE, msgspec.to_builtins(state))
        self._saved_at = time.monotonic()

    def _ensure_checkpoint(self) -> None:
        if self.best.value is None or not (self.out / CHECKPOINT).is_file():
            self.write({})


def is_due(step: int, every: int) -> bool:
    """Return True after each `every`-th step; `every` 0 means never."""
    return every > 0 and step % every == 0
