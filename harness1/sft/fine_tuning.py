"""Supervised fine-tuning: a dataset and a model in, a checkpoint out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from harness1.config import Config
from harness1.config.settings import recorded
from harness1.engines.engine import Engine, LocalEngine, TrainingService
from harness1.errors import UsageError
from harness1.hashing import file_digest
from harness1.model_folder import folder_hash
from harness1.models.backend import Backend
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.records import Record
from harness1.rows.file import RowFile
from harness1.rows.row import TrainRow
from harness1.runs.files import Stage, read_stage, refuse_full_disk, refuse_other, under_way
from harness1.sft.data_card import CARD, HELD_OUT, README, TRAIN, read_card
from harness1.sft.student import Student
from harness1.sft.validation import HeldOutValidation
from harness1.training.algorithm import make_algorithm
from harness1.training.followers import TrainerJob
from harness1.training.interrupts import uninterrupted
from harness1.training.log import NO_TRACKERS, VALIDATION_PREFIX, StepListener, Trackers, TrainLog
from harness1.training.micro_batch import shuffled_steps
from harness1.training.process_group import ALONE, ProcessGroup
from harness1.training.saving import disk_bytes, hash_of_base, load_state, write_card, write_state
from harness1.training.schedule import SavePlan, is_due
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer
from harness1.training.trl_trainer import saved_step, train_with_trl
from harness1.training.validation import OF_EPISODES, Best, evenly_spaced

OnPart = Callable[[str], None]
OpenEngine = Callable[["FineTuning", int, ProcessGroup], Engine]
VERB = "sft train"
STATE = Path("state", "state.pt")


def open_local_engine(work: FineTuning, steps: int, group: ProcessGroup) -> Engine:
    """Open our own trainer in the processes of a group; raise UsageError or MissingExtra as `LocalEngine`."""
    train, threads = work.config.train, work.config.machine.model.threads
    return LocalEngine(TrainerJob(work.model, make_algorithm("nll"), train, steps, work.device, threads), group)


def open_service_engine(service: TrainingService, work: FineTuning, steps: int, group: ProcessGroup) -> Engine:
    """Return the engine of a training service, whose sampler is `work.sampler`."""
    return service.open_engine(work.model, make_algorithm("nll"), work.config, steps)


@dataclass(frozen=True)
class FineTuning:
    """A fine-tuning job. The trainer's settings are `config.train`."""

    dataset: Path
    model: Path
    out: Path
    config: Config
    trainer: Literal["own", "trl"] = "own"
    device: str = "cpu"
    packing: bool = False
    """Put several rows into one sequence (TRL only)."""
    trackers: Trackers = NO_TRACKERS
    open_engine: OpenEngine = open_local_engine
    """Opens what holds the weights in training; TRL has its own."""
    sampler: Backend | None = None
    """Samples the weights of a training service."""

    def student(self) -> Student:
        """Return the student, after all checks that do not need the loaded model.

        Raises:
            UsageError: the dataset is not a dataset, unfinished or empty; the model does not fit it or cannot read its
                longest row; either is within the output folder; or the disk is too full.
        """
        for folder in (self.dataset, self.model):
            if folder.resolve().is_relative_to(self.out.resolve()):
                raise UsageError(f"{folder} is an input, and is inside --out: choose another --out")
        stage = read_stage(self.dataset)
        if stage is None or stage.verb != "sft build" or stage.status != "finished":
            raise UsageError(f"{self.dataset} is not a finished dataset: run harness1 sft build")
        student = Student.of(self.model, read_card(self.dataset))
        rows = RowFile(self.dataset / TRAIN)
        if not len(rows):
            raise UsageError(f"{self.dataset} has no rows to train on")
        student.check_length(rows)
        refuse_full_disk(self.out, disk_bytes(self.model, self.config.train))
        return student

    def stage(self) -> Stage:
        """Return the card of the job; equal jobs have equal cards."""
        inputs = {
            "dataset": {name: file_digest(self.dataset / name) for name in (CARD, TRAIN, HELD_OUT)},
            "model": folder_hash(self.model),
            "train": recorded(self.config.train, "train."),
            "trainer": f"{self.trainer}, packed" if self.packing else self.trainer,
        }
        if self.sampler is not None:
            inputs["engine"] = self.sampler.hash
        return Stage(VERB, inputs)

    def is_done(self) -> bool:
        """Return True if the output folder holds the finished checkpoint of this job; raise as `student` does."""
        return (self.out / CHECKPOINT).is_file() and self.stage().is_done(self.out)


def fine_tune(
    work: FineTuning,
    on_step: StepListener,
    group: ProcessGroup = ALONE,
    on_part: OnPart = lambda _: None,
    before_loading: Callable[[], None] = lambda: None,
) -> Checkpoint:
    """Train, and write the best checkpoint by `train.watch.metric` to `work.out`; resume an earlier run.

    Args:
        on_part: called with what is at work between two steps, and with the tokens done within a step; TRL's trainer
            shows its own bar.
        before_loading: called before our own trainer loads the model; what it raises ends the training.

    Raises:
        UsageError: as `FineTuning.student`, or the folder holds something else or cannot be written.
        Diverged: a loss is not finite; the best checkpoint so far is kept.
        MissingExtra: a dependency of the trainer is not installed.
        KeyboardInterrupt: after the step at work; the state is saved, except with TRL's trainer.
    """
    student, stage = work.student(), work.stage()
    if group.leads:
        refuse_other(stage, work.out, "training")
    with under_way(stage, work.out) if group.leads else nullcontext():
        card = Checkpoint(
            format=student.card.format,
            counter=student.chat.hash,
            env=student.card.env,
            env_hash=student.card.env_hash,
            base=stage.inputs["model"],
            dataset=stage.inputs["dataset"],
            train=stage.inputs["train"],
        )
        if work.trainer == "trl":
            done = _train_with_trl(work, card, group, on_step)
        else:
            before_loading()
            done = _Run(work, student, card, group, on_part).run(on_step)
    if group.leads:
        stage.write(work.out, status="finished", outputs={"step": done.step, "metrics": done.metrics})
    return done


def _train_with_trl(work: FineTuning, card: Checkpoint, group: ProcessGroup, on_step: StepListener) -> Checkpoint:
    """Train with TRL's trainer, which writes the weights of its last step."""
    train, out, begun = work.config.train, work.out, saved_step(work.out)
    rows, held_out = RowFile(work.dataset / TRAIN), RowFile(work.dataset / HELD_OUT)
    steps = train.epochs * -(-len(rows) // train.batch_rows)
    steps = min(steps, train.max_steps or steps)
    seen: dict[str, float] = {"step": float(begun)}
    on_step(begun, steps, {})
    with _open_log(work, begun or -1, writes=group.leads) as log:

        def note(values: dict[str, float]) -> None:
            seen.update(values)
            step = int(values["step"])
            measured = {name: value for name, value in values.items() if name != "step"}
            log.write(step, measured)
            on_step(step, steps, measured)

        validation = evenly_spaced(held_out, train.watch.rows)
        train_with_trl(rows, validation, work.model, out, train, note, packing=work.packing, cpu=work.device == "cpu")
    done = msgspec.structs.replace(card, step=int(seen["step"]))
    if group.leads:
        _copy_data_card(work)
        if train.lora.rank:
            done = msgspec.structs.replace(done, adapter_base=hash_of_base(work.model, card))
        if validation:
            done = msgspec.structs.replace(done, metrics={"nll": _loss_of(out, validation, work)})
        write_card(out, done)
    return done


def _loss_of(folder: Path, rows: Sequence[TrainRow], work: FineTuning) -> float:
    """Return the loss of rows under the model in a folder."""
    train = work.config.train
    return Trainer(load_trainable(folder, train, work.device), make_algorithm("nll"), train, steps=1).loss(rows)


def _copy_data_card(work: FineTuning) -> None:
    for name in (CARD, README):
        shutil.copyfile(work.dataset / name, work.out / f"data_{name}")


def _open_log(work: FineTuning, begun: int, *, writes: bool = True) -> TrainLog:
    out = work.out if writes else None
    return TrainLog(out, begun, work.trackers)


class _State(Record):
    trainer: str
    """The name of the engine's save."""
    best: Best
    card: Checkpoint
    validated: int


class _Run:
    """The loop of our own trainer and its state."""

    def __init__(
        self, work: FineTuning, student: Student, card: Checkpoint, group: ProcessGroup, on_part: OnPart
    ) -> None:
        train = work.config.train
        self.work, self.card, self.train, self.on_part = work, card, train, on_part
        self.rows = RowFile(work.dataset / TRAIN)
        held_out = RowFile(work.dataset / HELD_OUT)
        order = shuffled_steps(len(self.rows), train.batch_rows, train.epochs, train.seed)
        self.order = list(islice(order, train.max_steps or None))
        self.validation = HeldOutValidation(student, held_out, work.config, work.device, work.sampler)
        self.engine = work.open_engine(work, len(self.order), group)
        self.best, self.validated = Best(train.watch.metric), -1
        self.saves = SavePlan(train)
        if (state := load_state(work.out / STATE, _State)) is not None:
            self.engine.load((work.out / STATE).parent, state.trainer)
            self.best, self.card, self.validated = state.best, state.card, state.validated

    def run(self, on_step: StepListener) -> Checkpoint:
        on_step(self.engine.step_count, len(self.order), {})
        begun = self.engine.step_count if self.validated >= 0 else -1
        with _open_log(self.work, begun) as log:
            try:
                self._steps(log, on_step)
            except KeyboardInterrupt as interrupt:
                with uninterrupted():
                    self._save()
                interrupt.add_note(f"the same command continues after step {self.engine.step_count}")
                raise
        if not (self.work.out / CHECKPOINT).is_file():
            self._write({})
        return self.card

    def _steps(self, log: TrainLog, on_step: StepListener) -> None:
        """Validate and train to the last step, or until validations stop improving. An interrupted validation is done
        again; a step is ended first, as is a checkpoint."""
        begun, every = self.engine.step_count, self.train.watch.every
        while True:
            step = self.engine.step_count
            ends = step == len(self.order)
            if self.validated < step and (ends or step == 0 or is_due(step, every)):
                self._validate(log, on_step)
            ends = ends or self._stops()
            if step > begun and (ends or self.saves.is_due(step)):
                self._save()
            if ends:
                return
            with uninterrupted():
                self._step(log, on_step)

    def _step(self, log: TrainLog, on_step: StepListener) -> None:
        places, started = self.order[self.engine.step_count], time.perf_counter()
        values = self.engine.step([self.rows[place] for place in places], self._tell)
        values["seconds"] = time.perf_counter() - started
        values["tokens"] = float(sum(self.rows.lengths[place] for place in places))
        log.write(self.engine.step_count, values)
        on_step(self.engine.step_count, len(self.order), values)

    def _validate(self, log: TrainLog, on_step: StepListener) -> None:
        """Validate, and write a checkpoint if it is the best so far."""
        self.on_part("measuring on held-out tasks")
        metrics, step = self.validation.validate(self.engine), self.engine.step_count
        with uninterrupted():
            self.validated = step
            if not metrics:
                return
            named = {f"{VALIDATION_PREFIX}{name}": value for name, value in metrics.items()}
            log.write(step, named)
            on_step(step, len(self.order), named)
            # The untrained model is logged, but is not a checkpoint; and a mean over other tasks is another measure.
            comparable = "faults" not in metrics or self.best.metric not in OF_EPISODES
            if step and comparable and self.best.take(metrics):
                self._write(metrics)

    def _tell(self, done: int, of: int) -> None:
        self.on_part(f"{done:,} of {of:,} tokens of step {self.engine.step_count + 1}")

    def _stops(self) -> bool:
        return 0 < self.train.watch.patience <= self.best.stale

    def _write(self, metrics: dict[str, float]) -> None:
        """Write a checkpoint; its card has the metrics of what was written, loaded again."""
        out, card = self.work.out, msgspec.structs.replace(self.card, step=self.engine.step_count, metrics={})
        _copy_data_card(self.work)
        self.card = self.engine.write(out, card)
        if metrics:
            metrics = metrics | self.validation.loss(self.engine, out)
            self.card = msgspec.structs.replace(self.card, metrics=metrics)
            write_card(out, self.card)

    def _save(self) -> None:
        path = self.work.out / STATE
        state = _State(self.engine.save(path.parent), self.best, self.card, self.validated)
        write_state(path, msgspec.to_builtins(state))
        self.saves.saved()
