"""Train a policy by reinforcement learning, on the episodes that it plays. From a sampled token to a gradient:
`_PolicyLoop.update` takes a batch of groups from the buffer (`rl/groups.py`), whose episodes `Rollouts` played
(`rl/rollouts.py`); `training_rows` makes rows of their calls, with an advantage at each sampled token; `_take_steps`
hands them to the engine, whose `Trainer.step` (`training/trainer.py`) turns them into micro-batches, and runs the loss
of `training/algorithm.py` backwards."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import msgspec

from harness1.config import Config
from harness1.config.settings import put_back_removed
from harness1.data.leaks import Selection, ShareName, TaskFilter, open_filter
from harness1.data.open import from_anywhere, open_source
from harness1.data.origins import QUESTIONS, origins_of, searched_origins, united
from harness1.data.source import Source
from harness1.engines.engine import Engine, OpenEngine, TrainerJob, open_local_engine
from harness1.engines.loop import TrainingLoop
from harness1.env.environment import env_hash
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, describe_counter, refuse_session_names
from harness1.errors import UsageError
from harness1.model_folder import folder_hash
from harness1.models.chat_format import ChatFormat
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.models.fetch import resolve_model
from harness1.models.open import choose_device
from harness1.models.spec import ModelSpec
from harness1.plain import digest
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Record
from harness1.retrieval.open import absolute_index
from harness1.reward.measures import targets
from harness1.rl.admission import HEADROOM, read_report
from harness1.rl.groups import (
    Buffer,
    BufferState,
    EpisodeGroup,
    PlacedTask,
    RolloutProducer,
    batch_metrics,
    substeps,
    training_rows,
)
from harness1.rl.logprobs import check_start
from harness1.rl.pivots import open_training
from harness1.rl.rollouts import LocalRollouts, RayRollouts, Rollouts, Undisturbed, open_rollouts, publish_to
from harness1.rows import TrainRow
from harness1.runs.files import Stage, refuse_full_disk, refuse_other, under_way
from harness1.runs.folder import run_stage
from harness1.runs.journal import EPISODES as LINES
from harness1.runs.journal import EpisodeStore, continue_lines, finish
from harness1.sft.collect import check_taught_split, take_in_turn, tasks_of_runs
from harness1.training.algorithm import make_algorithm
from harness1.training.log import NO_TRACKERS, StepListener, Trackers, gold_among, measure_held_out
from harness1.training.process_group import ALONE, ProcessGroup
from harness1.training.saving import disk_bytes

MakeRows = Callable[[Sequence[EpisodeGroup], Config], list[TrainRow]]
VERB, EPISODES = "rl train", "episodes"
OpenRollouts = AbstractAsyncContextManager[Rollouts]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Training:
    """A training run, with the settings `config.rl` and `config.train`. The card of the episodes names the datasets, by
    absolute paths, and their split; that of the training keeps `selections`, how the tasks were chosen."""

    tasks: Sequence[PlacedTask]  # with their gold
    held_out: Sequence[PlacedTask]  # to validate on
    setups: Sequence[EpisodeSetup]  # indexed by `PlacedTask.setup`
    base: Path  # the folder of the model that training begins with
    out: Path
    config: Config
    device: str = "cpu"
    trackers: Trackers = NO_TRACKERS
    index_hashes: Sequence[str] = ()  # of the indexes that the setups search
    make_rows: MakeRows = field(default=lambda groups, config: training_rows(groups, config.rl))  # for experiments
    open_engine: OpenEngine = open_local_engine
    datasets: Sequence[str] = ()
    split: str = ""
    origins: Sequence[str] = QUESTIONS  # of the datasets
    selections: Sequence[Selection] = ()
    played_with: Mapping[str, str] = field(default_factory=dict)  # what else determines episodes: an agent's command
    undisturbed: Undisturbed = nullcontext  # the trainer steps in it; once it is tried before anything is played
    ends_at: float = math.inf  # by `time.monotonic`: later no batch is begun, as if all were trained

    def check(self) -> None:
        """Check everything that can be checked before a model is loaded; raise UsageError if there are no tasks, the
        checkpoint would overwrite the model, the metric of validation does not fit, or the disk is too full."""
        train = self.config.train
        if not self.tasks:
            left_out = "; ".join(each.line for each in self.selections if each.line)
            raise UsageError("there are no tasks to learn from" + f": {left_out}" * bool(left_out))
        if self.base.resolve().is_relative_to(self.out.resolve()):
            raise UsageError(f"{self.base} is an input, and is inside --out: choose another --out")
        if train.watch.metric not in ("reward", "curated_recall"):
            raise UsageError("rl train chooses by episodes: set train.watch.metric to reward or curated_recall")
        refuse_full_disk(self.out, disk_bytes(self.base, train))

    def is_done(self, policy_hash: str) -> bool:
        return (self.out / CHECKPOINT).is_file() and self.stage(policy_hash).is_done(self.out)

    def stage(self, policy_hash: str) -> Stage:
        """Return the card of the work, which begins with a policy; equal work has an equal card."""
        config, env = self.config, self.config.env.plain()
        if config.env.plugins:
            env["plugins"] = config.env.to_hash()["plugins"]  # a file of one's own counts by its content
        inputs = {
            "tasks": digest([(placed.task, placed.setup) for placed in self.tasks]),
            "held_out": digest([(placed.task, placed.setup) for placed in self.held_out]),
            "model": folder_hash(self.base),
            "policy": policy_hash,
            "indexes": list(self.index_hashes),
            "env": digest(env),
            "reward": config.reward_hash,
            "rl": msgspec.to_builtins(config.rl),
            "train": msgspec.to_builtins(config.train),
            **self.played_with,
        }
        put_back_removed(inputs)  # a training that was recorded with them is the same
        return Stage(VERB, inputs, outputs={"selections": msgspec.to_builtins(self.selections)})


def train_policy(
    work: Training,
    players: OpenRollouts,
    chat: ChatFormat,
    policy_hash: str,
    on_step: StepListener,
    group: ProcessGroup = ALONE,
) -> Checkpoint:
    """Train, and write the best checkpoint by `train.watch.metric` to `work.out`; resume an earlier run. `players`
    opens the rollouts within the event loop of the training; they begin with the weights of `work.base`. This process
    leads the group. Raise UsageError as `Training.check`, or the folder holds something else, the episodes were not
    sampled by the weights in training, nothing can be learned, or the time was up before the first batch; Diverged if a
    loss is not finite (the best checkpoint is kept); InfrastructureFault if all recent episodes broke."""
    work.check()
    stage = work.stage(policy_hash)
    refuse_other(stage, work.out, "training")
    searched = searched_origins(*(setup.retriever for setup in work.setups))
    origins = united(work.origins, origins_of(work.base), searched)
    with under_way(stage, work.out):
        card = Checkpoint(
            format=chat.name,
            counter=chat.hash,
            env=work.config.env.plain(),
            env_hash=env_hash(work.config.env),
            base=stage.inputs["model"],
            dataset={"tasks": stage.inputs["tasks"]},
            train={"rl": stage.inputs["rl"], "train": stage.inputs["train"]},
            origins=origins,
        )
        rl, threads = work.config.rl, work.config.machine.threads
        steps, algorithm = work.config.batches * rl.substeps, make_algorithm(rl.algorithm, rl)
        job = TrainerJob(work.base, algorithm, work.config.train, steps, work.device, threads)
        loop = _PolicyLoop(work, work.open_engine(job, group), card, players, on_step)
        first, (counted, spoken) = work.setups[0], describe_counter(chat)
        hashes = {"env": env_hash(work.config.env), **counted}
        run = run_stage(work.config, first.policy, {}, absolute_index(first.retriever), hashes, spoken)
        of = {"datasets": list(work.datasets), "split": work.split} if work.datasets else {}
        # The episodes form a run, which can be replayed and viewed.
        run = msgspec.structs.replace(run, outputs={**run.outputs, **of}, origins=origins)
        played = continue_lines(run, work.out / EPISODES / LINES)
        played.write(work.out / EPISODES)
        done = loop.train()
        finish(played, work.out / EPISODES / LINES)
    counts = msgspec.structs.asdict(loop.buffer.counts)
    outputs = {"step": done.step, "metrics": done.metrics, **counts}
    stage.write(work.out, status="finished", outputs=stage.outputs | outputs)
    return done


class _PolicyLoop(TrainingLoop):
    def __init__(
        self, work: Training, engine: Engine, card: Checkpoint, players: OpenRollouts, on_step: StepListener
    ) -> None:
        config = work.config
        super().__init__(engine, work.out, card, config.train, config.batches, on_step, "batch", work.ends_at)
        self._work, self._players = work, players
        self._rollouts: Rollouts
        self._producer: RolloutProducer
        self._gold = gold_among(placed.task for placed in work.tasks)
        self.buffer: Buffer[EpisodeGroup] = Buffer(config.rl.groups, config.rl.staleness)
        if self.resumed is not None:
            self.buffer.load_state(msgspec.convert(self.resumed.buffer, BufferState))
        self._counted = self.buffer.counts

    def buffer_state(self) -> BufferState:
        return self.buffer.state()

    async def run(self) -> None:
        work, rl = self._work, self._work.config.rl
        async with self._players as self._rollouts:
            with EpisodeStore(work.out / EPISODES) as store, self.open_log(work.trackers) as self.log:
                async with work.undisturbed():
                    pass  # so that a sampler that cannot sleep is known now, and one that was left asleep is awake
                await self.engine.publish(self.version, self._rollouts.publish)
                if self.validated < 0:
                    await self.validate()
                producer = RolloutProducer(self._rollouts, work.tasks, rl, self.buffer, store.append)
                async with producer as self._producer:
                    with _short_turns():
                        await super().run()

    async def update(self) -> None:
        began = time.perf_counter()
        groups = await self._producer.batch(self.version)
        waited = time.perf_counter() - began
        seen = batch_metrics(groups, self.version, self._gold)
        async with self._work.undisturbed():
            trained, interrupt = await _in_thread(partial(self._take_steps, groups))
        stepped = time.perf_counter() - began - waited
        if interrupt is None:
            try:
                await self.engine.publish(self.version, self._rollouts.publish)
            except asyncio.CancelledError as error:  # a resumed training publishes again
                interrupt = error
        self._producer.release()
        before, self._counted = self._counted, self.buffer.counts
        now = self._counted
        self.report(
            trained
            | seen
            | {"zero_variance": (now.filtered - before.filtered) / max(1, now.produced - before.produced)}
            | {f"groups/{name}": float(value) for name, value in msgspec.structs.asdict(now).items()}
            | {"wait_seconds": waited, "train_seconds": stepped, "seconds": time.perf_counter() - began}
        )
        if interrupt is not None:
            raise interrupt

    def _take_steps(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        rl = self._work.config.rl
        rows = self._work.make_rows(groups, self._work.config)
        values: dict[str, float] = {}
        if self.version == self.begun:  # these very weights must have sampled them
            replayed = [known for row in self.engine.logprobs(rows) for known in row]
            recorded = [known for row in rows for known in compress(row.rollout_logprobs or (), row.loss_mask)]
            values |= check_start(replayed, recorded, self._work.config)
        steps = [self.engine.step(part) for part in substeps(rows, rl.substeps, rl.seed + self.version)]
        for name in steps[0]:  # tokens are summed, maxima stay maxima, and the rest is averaged
            combine = sum if name == "trained_tokens" else max if name.endswith("_max") else fmean
            values[name] = combine([step[name] for step in steps])
        self.version += 1
        return values | {"rows": float(len(rows)), "tokens": float(sum(len(row.token_ids) for row in rows))}

    async def measure(self) -> dict[str, float]:
        seed = self._work.config.rl.seed
        jobs = [EpisodeJob(placed.task, seed=seed, setup=placed.setup) for placed in self._work.held_out]
        return await measure_held_out(self._rollouts.run, jobs)


TURN_S = 5e-4
"""How long a thread keeps Python to itself while another waits. Training asks for it at every operation of torch, and
at Python's own 5 ms waits for the threads that play: a batch of a small model on two cores takes 1.08 times as long."""


@contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def _in_thread(work: Callable[[], Result]) -> tuple[Result, asyncio.CancelledError | None]:
    """Run work in a thread to its end; return its result, and the interrupt that came meanwhile, to be raised later."""
    # A future and not a task, so that a second Ctrl-C, which cancels all tasks, leaves it alone.
    running = asyncio.get_running_loop().run_in_executor(None, work)
    interrupt = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            interrupt = error
    return running.result(), interrupt


DEV = "dev"  # the split for validation, if a dataset has it


class TrainingInputs(Record):
    """What a training run learns from, and what it begins with."""

    data: tuple[str, ...] = ()  # validated on their `dev`, or on tasks that are held out
    model: str = ""  # the starting weights: hf:PATH, or vllm:MODEL@URL with the same weights on this machine
    split: str = "train"  # the split of each dataset that tasks are taken from
    index: tuple[str, ...] = ()  # an existing index for each dataset; empty: build one for each
    admission: tuple[str, ...] = ()  # a report of `rl check` for each dataset, for its admitted tasks; empty: all
    share: ShareName = ""  # learn only from the tasks that `data.sft_share` gives to fine-tuning, or to RL; empty: all
    against: tuple[str, ...] = ()  # evaluation sets beside `dev` and `test`: DATASET or DATASET:SPLIT (`data.leaks`)
    exclude: tuple[str, ...] = ()  # folders of runs, SFT datasets or checkpoints, whose tasks are not learned from


class TaskChoice(NamedTuple):
    """The tasks to learn from, the validation tasks (no task is in both), and an account for each dataset."""

    tasks: list[PlacedTask]
    held_out: list[PlacedTask]
    selections: list[Selection]


def choose_tasks(
    sources: Sequence[Source],
    split: str,
    admitted: Sequence[frozenset[str] | None],
    config: Config,
    sieve: TaskFilter | None = None,
) -> TaskChoice:
    """Choose the tasks of a split of each dataset that may be learned from (of those `admitted`, None for all), and
    `train.watch.tasks` validation tasks, from each dataset in turn: from its split `dev`, or drawn from the tasks by
    `rl.seed` if there is no `dev` or it is the split to learn from. Unless `data.leaks` is "keep", what is learned
    gives away no validation task, and neither gives away a test task: the sieve, by default that of `open_filter`,
    leaves them out. UsageError if the split is missing, for testing, or has no task left, or one has no gold."""
    for source in sources:
        check_taught_split(split, source.name)
    sieve = sieve or open_filter(config.data, sources, {(source.name, split) for source in sources})
    choice, wanted = TaskChoice([], [], []), config.train.watch.tasks
    validation: list[list[PlacedTask]] = []
    for setup, (source, ids) in enumerate(zip(sources, admitted, strict=True)):
        tasks, account = sieve.select(source.name, split, source.tasks(split))
        drawn = tuple[str, ...]()
        if DEV in source.splits and split != DEV:
            held_out = sieve.validation(source.name, DEV, source.tasks(DEV))[:wanted]
            apart = tasks
        else:
            share = min(wanted // len(sources) + 1 if wanted else 0, len(tasks) // 2)
            places = set(Random(f"{config.rl.seed}/held out").sample(range(len(tasks)), share))
            held_out = [task for at, task in enumerate(tasks) if at in places]
            drawn = tuple(task.task_id for task in held_out)
            apart = sieve.beside(held_out, source.name, [task for at, task in enumerate(tasks) if at not in places])
        left = [task for task in apart if ids is None or task.task_id in ids]
        account = msgspec.structs.replace(
            account,
            held_out=drawn,
            beside=len(tasks) - len(drawn) - len(apart),
            rejected=len(apart) - len(left),
            learned=tuple(task.task_id for task in left),
        )
        if not left:
            raise UsageError(account.line or f"{source.name} has no tasks in split {split}")
        for task in (*left, *held_out):
            targets(task.task_id, task.gold, config.index.unit)
        choice.tasks.extend(PlacedTask(task, setup) for task in left)
        choice.selections.append(account)
        validation.append([PlacedTask(task, setup) for task in held_out])
    return choice._replace(held_out=take_in_turn(validation, wanted))


WEIGHTS = "weights"  # the folder of versions of the weights, for servers that load them by path
FindIndex = Callable[[Source, str | None], str]  # returns the index of a source, which may be one that the user names


def training_on(
    choice: TaskChoice, setups: Sequence[EpisodeSetup], inputs: TrainingInputs, out: Path, **more: Any
) -> Training:
    """Return the training on chosen tasks of datasets, with the settings of the first setup; `more`: other fields."""
    config = setups[0].config
    base, device = resolve_model(ModelSpec.read(inputs.model).model), config.machine.device or choose_device()
    more |= {"datasets": list(map(from_anywhere, inputs.data)), "split": inputs.split}
    more |= {"selections": choice.selections, "origins": origins_of(*inputs.data)}
    return Training(choice.tasks, choice.held_out, setups, base, out, config, device, **more)


def open_task_training(
    config: Config, inputs: TrainingInputs, out: Path, policy: LanguageModelPolicy, find_index: FindIndex
) -> tuple[Training, OpenRollouts]:
    """Open a training run on whole episodes; raise UsageError as `open_tasks`, or workers cannot have the model."""
    choice, setups = open_tasks(config, inputs, find_index)
    hashes = [setup.open_retriever().info.index_hash for setup in setups]
    work = training_on(choice, setups, inputs, out, index_hashes=hashes)
    spec, fleet, versions = ModelSpec.read(inputs.model), config.machine.fleet, out / WEIGHTS
    if not fleet.workers:
        return work, nullcontext(LocalRollouts(setups, policy, work.base, versions))
    if spec.url is not None:
        raise UsageError("each worker of a fleet has its own model: give hf:PATH or vllm:PATH, not a server")
    for setup in setups:
        refuse_session_names(setup)
    # Workers run in a different directory.
    base = work.base.resolve()
    whole = f"{spec.kind}:{base}"
    found = [replace(each, retriever=absolute_index(each.retriever), policy=whole) for each in setups]
    make = partial(open_rollouts, found, whole, base, versions.resolve())
    return work, RayRollouts(make, fleet, config.machine.concurrency)


def open_tasks(config: Config, inputs: TrainingInputs, find_index: FindIndex) -> tuple[TaskChoice, list[EpisodeSetup]]:
    """Return the tasks of datasets that may be learned from, the validation tasks, and the setup of each dataset; raise
    UsageError if the numbers of indexes, reports and datasets differ, a report is on another dataset, reward or
    environment, or the tasks do not fit (`choose_tasks`)."""
    sources = [open_source(data) for data in inputs.data]
    for name in ("index", "admission"):
        if (count := len(getattr(inputs, name))) not in (0, len(sources)):
            raise UsageError(f"{count} of --{name} for {len(sources)} of --data: give one for each, or none")
    admitted: list[frozenset[str] | None] = [None] * len(sources)
    for at, path in enumerate(inputs.admission):
        report, source = read_report(Path(path)), sources[at]
        of = {"dataset": open_source(report.dataset).name, "reward": report.reward_hash, "environment": report.env_hash}
        ours = {"dataset": source.name, "reward": config.reward_hash, "environment": env_hash(config.env)}
        if others := [name for name, known in ours.items() if of[name] != known]:
            differs = f"{path} is a report on another {' and another '.join(others)}"
            raise UsageError(f"{differs}: run harness1 rl check with the --config of the training")
        admitted[at] = frozenset(report.list_admitted(HEADROOM))
    excluded = tasks_of_runs(inputs.exclude)
    taught = {(source.name, inputs.split) for source in sources}
    sieve = open_filter(config.data, sources, taught, share=inputs.share, against=inputs.against, excluded=excluded)
    choice = choose_tasks(sources, inputs.split, admitted, config, sieve)
    named = inputs.index or [None] * len(sources)
    indexes = [find_index(source, index) for source, index in zip(sources, named, strict=True)]
    return choice, [EpisodeSetup(config, index, inputs.model) for index in indexes]


def open_pivot_training(
    config: Config, inputs: TrainingInputs, out: Path, policy: LanguageModelPolicy, pivots: Path
) -> tuple[Training, OpenRollouts]:
    """Open a training run on the single turns of a teacher that a profile kept; raise UsageError for settings of whole
    episodes; otherwise as `open_training`."""
    if config.machine.fleet.workers or inputs.admission:
        raise UsageError("--pivots trains on single turns here: without machine.fleet.workers and --admission")
    if inputs.share:
        raise UsageError("--share divides the tasks of --data: collect the teacher's episodes over one share instead")
    if config.train.watch.metric != "reward":
        raise UsageError("single turns have no recall of their own: set train.watch.metric=reward")
    base = resolve_model(ModelSpec.read(inputs.model).model)
    publish = partial(publish_to, policy.model, base=base, versions=out / WEIGHTS)
    index, excluded = inputs.index[0] if inputs.index else "", tasks_of_runs(inputs.exclude)
    train, held_out, rollouts, chosen = open_training(pivots, policy, config, publish, index, inputs.against, excluded)
    tasks, watched = list(map(PlacedTask, train)), list(map(PlacedTask, held_out[: config.train.watch.tasks]))
    setups, device = [EpisodeSetup(config, index, inputs.model)], config.machine.device or choose_device()
    work = Training(tasks, watched, setups, base, out, config, device, origins=origins_of(pivots), selections=[chosen])
    return work, nullcontext(rollouts)
