"""Supervised fine-tuning: a dataset and a model in, a checkpoint out."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import msgspec

from harness1.config import ChatPolicy, Config, Env
from harness1.config.env import read_env
from harness1.config.settings import to_record
from harness1.data.open import open_source
from harness1.data.origins import origins_of
from harness1.engines.engine import Engine, OpenEngine, TrainerJob, open_local_engine
from harness1.engines.loop import TrainingLoop
from harness1.env.environment import choose
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, play_in_loop
from harness1.errors import SchemaError, UsageError
from harness1.model_folder import folder_hash
from harness1.models.backend import Backend
from harness1.models.causal_model import context_window
from harness1.models.chat_format import ChatFormat
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.models.formats import open_format
from harness1.models.tokenizer import open_tokenizer
from harness1.models.transformers_backend import TransformersBackend, open_transformers
from harness1.plain import file_digest
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Sampling, Task, ToolCall
from harness1.rows import RowFile, TrainRow
from harness1.runs.files import Stage, read_stage, refuse_full_disk, refuse_other, under_way
from harness1.sft.collect import take_in_turn
from harness1.sft.data_card import CARD, HELD_OUT, README, TRAIN, CollectionRun, DataCard, read_card
from harness1.tools.registry import Toolbox
from harness1.training.algorithm import make_algorithm
from harness1.training.log import NO_TRACKERS, StepListener, Trackers, TrainLog, measure_held_out
from harness1.training.process_group import ALONE, ProcessGroup, delay_interrupt
from harness1.training.saving import disk_bytes, hash_of_base, write_card
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer, shuffle_steps
from harness1.training.trl_trainer import find_saved_step, train_with_trl

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


Item = TypeVar("Item")


class HeldOutTurn(NamedTuple):
    """A turn of a teacher that the policy is asked to take: the prompt and the teacher's output."""

    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


def space_evenly(items: Sequence[Item], limit: int) -> list[Item]:
    """Return at most `limit` items, spread evenly over all."""
    count = min(limit, len(items))
    return [items[at * len(items) // count] for at in range(count)]


def pick_turns(rows: Sequence[TrainRow], limit: int) -> list[HeldOutTurn]:
    """Return at most `limit` trained stretches of rows as turns, spread evenly over all."""
    turns = []
    for row in rows:
        changes = [place for place, (one, other) in enumerate(pairwise((0, *row.loss_mask, 0))) if one != other]
        for begin, end in zip(changes[::2], changes[1::2], strict=True):
            turns.append(HeldOutTurn(row.token_ids[:begin], row.token_ids[begin:end]))
    return space_evenly(turns, limit)


def is_valid(call: ToolCall, toolbox: Toolbox) -> bool:
    """Return True if an environment would execute a call: the tool exists, and the arguments match its schema."""
    try:
        msgspec.convert(call.arguments, toolbox.tools[call.name].arguments)
    except (KeyError, msgspec.ValidationError):
        return False
    return True


async def turn_metrics(
    backend: Backend, chat: ChatFormat, toolbox: Toolbox, turns: Sequence[HeldOutTurn], reserve: int
) -> dict[str, float]:
    """Compare the policy's greedy output, of at most `reserve` tokens, at each turn with the teacher's. Return the
    shares of turns by what the output contains: `valid`, an action that an environment would execute; `tool_agreement`,
    one that calls the teacher's tool; `action_agreement`, with the same arguments."""
    sampling = Sampling(temperature=0.0, max_tokens=reserve, stop_ids=chat.stop_ids)

    def read(ids: Sequence[int]) -> ToolCall | None:
        actions = chat.parse(ids, toolbox.specs).actions
        return choose(actions)[0] if actions else None

    async def one(turn: HeldOutTurn) -> dict[str, float]:
        action = read((await backend.generate(turn.prompt_ids, sampling)).output_ids)
        target = read(turn.target_ids)
        return {
            "valid": float(action is not None and is_valid(action, toolbox)),
            "tool_agreement": float(action is not None and target is not None and action.name == target.name),
            "action_agreement": float(action is not None and action == target),
        }

    found = await asyncio.gather(*map(one, turns))
    return {name: fmean(each[name] for each in found) for name in found[0]} if found else {}


@dataclass(frozen=True)
class Student:
    """A model and the dataset that it will learn from."""

    folder: Path
    card: DataCard
    chat: ChatFormat
    env: Env

    @classmethod
    def of(cls, folder: Path, card: DataCard) -> Student:
        """Return the student of a model's folder. Raise UsageError if its tokenizer is not that of the rows, or lacks
        control tokens of their format; SchemaError if this version cannot read the card's environment."""
        chat = open_format(card.format, open_tokenizer(folder))
        if chat.hash != card.format_hash:
            made = f"the rows were made with the tokenizer of {card.tokenizer} in the format {card.format}"
            raise UsageError(f"{made}, but {folder} has another: build them again with --rerender --tokenizer")
        try:
            return cls(folder, card, chat, read_env(card.env))
        except msgspec.ValidationError as error:
            raise SchemaError(f"the data card's environment cannot be read: {error}") from error

    def check_length(self, rows: RowFile) -> None:
        """Refuse rows that are longer than the model's context window, with a UsageError."""
        window, longest = context_window(self.folder), int(rows.lengths.max(initial=0))
        if window is not None and longest > window:
            model = f"{self.folder.name} reads {window}: build with sft.max_tokens={window}"
            raise UsageError(f"a row has {longest} tokens, but {model}")

    def list_held_out(self, limit: int) -> list[tuple[CollectionRun, Task]]:
        found: list[list[tuple[CollectionRun, Task]]] = []
        for run in {run.name: run for run in self.card.runs}.values():
            wanted = set(self.card.held_out_tasks.get(run.name, ()))
            tasks = [task for task in open_source(run.dataset).tasks(run.split) if task.task_id in wanted]
            found.append([(run, task) for task in tasks])
        return take_in_turn(found, limit)


class HeldOutValidation:
    """Validates a student between steps, on an evenly spaced part of the held-out rows and tasks. It samples from a
    separate model with copies of the trained weights, as users will, or from the sampler of a service that trains."""

    def __init__(
        self, student: Student, rows: RowFile, config: Config, device: str, sampler: Backend | None = None
    ) -> None:
        watch, machine = config.train.watch, config.machine
        self._student, self._config = student, config
        self._rows = space_evenly(rows, watch.rows)
        self._turns = pick_turns(space_evenly(rows, watch.turns), watch.turns)
        setups: dict[str, EpisodeSetup] = {}
        self._jobs: list[EpisodeJob] = []
        for run, task in student.list_held_out(watch.tasks) if watch.tasks else []:
            if run.name not in setups:  # over the index of the teacher, in its environment
                setups[run.name] = EpisodeSetup(msgspec.structs.replace(config, env=student.env), run.index, "")
                setups[run.name].open_retriever()  # one that is gone is told before any step
            self._jobs.append(EpisodeJob(task, setup=list(setups).index(run.name)))
        self._setups = list(setups.values())
        self._backend: Backend | None = None
        if self._turns or self._jobs:
            self._backend = sampler or open_transformers(
                student.folder,
                device=device,
                dtype=config.policy.dtype,
                threads=machine.threads,
                rows=machine.slots,
                cache_tokens=machine.model.cache_tokens,
            )

    async def validate(self, engine: Engine) -> dict[str, float]:
        """Return the metrics of the present weights: `nll` of rows, `turn_metrics`, and those of whole episodes."""
        metrics, backend = {"nll": engine.loss(self._rows)} if self._rows else {}, self._backend
        if backend is None:
            return metrics
        env, chat = self._student.env, self._student.chat
        load = backend.load_state if isinstance(backend, TransformersBackend) else _refuse_weights
        await engine.publish(engine.step_count, load)
        metrics |= await turn_metrics(backend, chat, Toolbox.of(env), self._turns, env.generation_reserve)
        greedy = ChatPolicy(temperature=0.0, format_retries=0)
        policy = LanguageModelPolicy(backend, chat, env.generation_reserve, greedy)
        return metrics | await measure_held_out(partial(play_in_loop, self._setups, policy), self._jobs)


async def _refuse_weights(state: Weights, version: int) -> None:
    raise UsageError("the weights of this engine are not sampled by a training service")


OnPart = Callable[[str], None]
VERB = "sft train"


@dataclass(frozen=True)
class FineTuning:
    """A fine-tuning job. The trainer's settings are `config.train`."""

    dataset: Path
    model: Path
    out: Path
    config: Config
    trainer: Literal["own", "trl"] = "own"
    device: str = "cpu"
    packing: bool = False  # put several rows into one sequence (TRL only)
    trackers: Trackers = NO_TRACKERS
    open_engine: OpenEngine = open_local_engine  # opens what holds the weights in training; TRL has its own
    sampler: Backend | None = None  # samples the weights of a training service

    def student(self) -> Student:
        """Return the student, after all checks that do not need the loaded model. Raise UsageError: the dataset is
        none, unfinished or empty; the model does not fit it; either is within the output folder; the disk is full."""
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
            "train": to_record(self.config.train, "train."),
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
    """Train, and write the best checkpoint by `train.watch.metric` to `work.out`; resume an earlier run. `on_part` is
    called with what is at work between two steps, and with the tokens done within a step, but not by TRL's trainer;
    `before_loading` before our own loads the model. Raise UsageError as `FineTuning.student`, or the folder holds
    something else or cannot be written; Diverged if a loss is not finite (the best checkpoint so far is kept);
    KeyboardInterrupt after the step at work; the state is saved, except with TRL's trainer."""
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
            origins=origins_of(work.dataset, work.model),
        )
        if work.trainer == "trl":
            done = _train_with_trl(work, card, group, on_step)
        else:
            before_loading()
            done = _RowsLoop(work, student, card, group, on_step, on_part).train()
    if group.leads:
        stage.write(work.out, status="finished", outputs={"step": done.step, "metrics": done.metrics})
    return done


def _train_with_trl(work: FineTuning, card: Checkpoint, group: ProcessGroup, on_step: StepListener) -> Checkpoint:
    train, out, begun = work.config.train, work.out, find_saved_step(work.out)
    rows = RowFile(work.dataset / TRAIN)
    validation = space_evenly(RowFile(work.dataset / HELD_OUT), train.watch.rows)
    steps = train.epochs * -(-len(rows) // train.batch_rows)
    steps = min(steps, train.max_steps or steps)
    seen: dict[str, float] = {"step": float(begun)}
    on_step(begun, steps, {})
    with TrainLog(work.out if group.leads else None, begun or -1, work.trackers) as log:

        def note(values: dict[str, float]) -> None:
            seen.update(values)
            step = int(values["step"])
            measured = {name: value for name, value in values.items() if name != "step"}
            log.write(step, measured)
            on_step(step, steps, measured)

        train_with_trl(rows, validation, work.model, out, train, note, packing=work.packing, cpu=work.device == "cpu")
    done = msgspec.structs.replace(card, step=int(seen["step"]))
    if group.leads:
        _copy_data_card(work)
        if train.lora.rank:
            done = msgspec.structs.replace(done, adapter_base=hash_of_base(work.model, card))
        if validation:
            written = Trainer(load_trainable(out, train, work.device), make_algorithm("nll"), train, steps=1)
            done = msgspec.structs.replace(done, metrics={"nll": written.loss(validation)})
        write_card(out, done)
    return done


def _copy_data_card(work: FineTuning) -> None:
    for name in (CARD, README):
        if not (work.dataset / name).is_file():
            raise UsageError(f"there is no {name} in {work.dataset}")
        shutil.copyfile(work.dataset / name, work.out / f"data_{name}")


class _RowsLoop(TrainingLoop):
    def __init__(
        self,
        work: FineTuning,
        student: Student,
        card: Checkpoint,
        group: ProcessGroup,
        on_step: StepListener,
        on_part: OnPart,
    ) -> None:
        train, threads = work.config.train, work.config.machine.threads
        self._work, self._on_part = work, on_part
        self._rows = RowFile(work.dataset / TRAIN)
        order = shuffle_steps(len(self._rows), train.batch_rows, train.epochs, train.seed)
        self._order = list(islice(order, train.max_steps or None))
        held_out = RowFile(work.dataset / HELD_OUT)
        self._validation = HeldOutValidation(student, held_out, work.config, work.device, work.sampler)
        steps = len(self._order)
        job = TrainerJob(work.model, make_algorithm("nll"), train, steps, work.device, threads)
        super().__init__(work.open_engine(job, group), work.out, card, train, steps, on_step)

    async def run(self) -> None:
        with self.open_log(self._work.trackers) as self.log:
            await super().run()

    async def update(self) -> None:
        def tell(done: int, of: int) -> None:
            self._on_part(f"{done:,} of {of:,} tokens of step {self.version + 1}")

        with delay_interrupt():
            places, began = self._order[self.version], time.perf_counter()
            values = self.engine.step([self._rows[place] for place in places], tell)
            self.version += 1
            values["seconds"] = time.perf_counter() - began
            values["tokens"] = float(sum(self._rows.lengths[place] for place in places))
            self.report(values)
        await asyncio.sleep(0)  # where an interrupt that was put off is raised

    async def measure(self) -> dict[str, float]:
        self._on_part("measuring on held-out tasks")
        return await self._validation.validate(self.engine)

    def write(self, metrics: dict[str, float]) -> None:
        _copy_data_card(self._work)
        super().write(metrics)
