"""Train a policy by reinforcement learning, on the episodes that it plays."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from harness1.config import Config
from harness1.config.settings import put_back_removed
from harness1.data.leaks import Selection
from harness1.engines.engine import Engine, LocalEngine, TrainingService
from harness1.env.environment import env_hash
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, counted_with
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.model_folder import folder_hash
from harness1.models.chat_format import ChatFormat
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.records import Episode, Gold, Status, Task
from harness1.retrieval.open import absolute_index
from harness1.rl.batch_metrics import batch_metrics, episode_metrics
from harness1.rl.learner import Learner, MakeRows
from harness1.rl.producer import RolloutProducer
from harness1.rl.rollouts import Rollouts
from harness1.rl.shared_devices import Undisturbed
from harness1.rl.task_stream import PlacedTask, TaskStream
from harness1.rl.training_rows import training_rows
from harness1.runs.files import Stage, refuse_full_disk, refuse_other, under_way
from harness1.runs.folder import run_stage
from harness1.runs.journal import EPISODES as LINES
from harness1.runs.journal import EpisodeStore, continued, finish
from harness1.training.algorithm import make_algorithm
from harness1.training.followers import TrainerJob
from harness1.training.log import NO_TRACKERS, VALIDATION_PREFIX, StepListener, Trackers, TrainLog
from harness1.training.process_group import ALONE, ProcessGroup
from harness1.training.saving import disk_bytes
from harness1.training.schedule import SavePlan, is_due
from harness1.training.trainer import Diverged

VERB = "rl train"
EPISODES = "episodes"
OpenRollouts = AbstractAsyncContextManager[Rollouts]
OpenEngine = Callable[["Learning", ProcessGroup], Engine]
Result = TypeVar("Result")


def open_local_engine(work: Learning, group: ProcessGroup) -> Engine:
    """Open our own trainer in the processes of a group; raise UsageError or MissingExtra as `LocalEngine`."""
    rl, train, threads = work.config.rl, work.config.train, work.config.machine.model.threads
    steps, algorithm = work.config.batches * rl.substeps, make_algorithm(rl.algorithm, rl)
    return LocalEngine(TrainerJob(work.base, algorithm, train, steps, work.device, threads), group)


def open_service_engine(service: TrainingService, work: Learning, group: ProcessGroup) -> Engine:
    """Return the engine of a training service."""
    rl = work.config.rl
    return service.open_engine(work.base, make_algorithm(rl.algorithm, rl), work.config, rl.batches * rl.substeps)


@dataclass(frozen=True)
class Learning:
    """A training run, with the settings `config.rl` and `config.train`.

    Args:
        tasks: tasks to learn from, with their gold.
        held_out: tasks to validate on.
        setups: indexed by `PlacedTask.setup`.
        base: the folder of the model that training begins with.
        index_hashes: the hashes of the indexes that the setups search.
        make_rows: makes rows of groups; given in experiments.
        open_engine: opens what holds the weights in training.
        datasets: the datasets of the tasks, by absolute paths, and their `split`; the card of the episodes names them.
        selections: how the tasks were chosen; the card of the training keeps it.
        played_with: what else determines the episodes, as the command of an agent.
        undisturbed: the trainer steps in it; once it is tried before anything is played.
        ends_at: the reading of `time.monotonic` after which no other batch is begun, as if all were trained.
    """

    tasks: Sequence[PlacedTask]
    held_out: Sequence[PlacedTask]
    setups: Sequence[EpisodeSetup]
    base: Path
    out: Path
    config: Config
    device: str = "cpu"
    trackers: Trackers = NO_TRACKERS
    index_hashes: Sequence[str] = ()
    make_rows: MakeRows = field(default=lambda groups, config: training_rows(groups, config.rl))
    open_engine: OpenEngine = open_local_engine
    datasets: Sequence[str] = ()
    split: str = ""
    selections: Sequence[Selection] = ()
    played_with: Mapping[str, str] = field(default_factory=dict)
    undisturbed: Undisturbed = nullcontext
    ends_at: float = math.inf

    def check(self) -> None:
        """Check everything that can be checked before a model is loaded.

        Raises:
            UsageError: there are no tasks, the checkpoint would overwrite the model, the metric of validation does not
                fit, or the disk is too full.
        """
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
        """Return True if the folder holds the checkpoint of this very work."""
        return (self.out / CHECKPOINT).is_file() and self.stage(policy_hash).is_done(self.out)

    def stage(self, policy_hash: str) -> Stage:
        """Return the card of the work; equal work has an equal card.

        Args:
            policy_hash: the hash of the policy that training begins with.
        """
        config, env = self.config, self.config.env.plain()
        if config.env.plugins:
            env["plugins"] = config.env.hashed()["plugins"]  # a file of one's own counts by its content
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


def learn(
    work: Learning,
    players: OpenRollouts,
    chat: ChatFormat,
    policy_hash: str,
    on_step: StepListener,
    group: ProcessGroup = ALONE,
) -> Checkpoint:
    """Train, and write the best checkpoint by `train.watch.metric` to `work.out`; resume an earlier run.

    Args:
        players: opens the rollouts within the event loop of the training; they begin with the weights of `work.base`.
        chat: the format of the policy.
        group: the processes that train together; this one leads.

    Raises:
        UsageError: as `Learning.check`; the folder holds something else or cannot be written; the episodes were not
            sampled by the weights in training; no group has anything to learn from; or the time was up before the
            first batch.
        Diverged: a loss is not finite; the best checkpoint so far is kept.
        InfrastructureFault: all recent episodes were broken.
    """
    work.check()
    stage = work.stage(policy_hash)
    refuse_other(stage, work.out, "training")
    with under_way(stage, work.out):
        card = Checkpoint(
            format=chat.name,
            counter=chat.hash,
            env=work.config.env.plain(),
            env_hash=env_hash(work.config.env),
            base=stage.inputs["model"],
            dataset={"tasks": stage.inputs["tasks"]},
            train={"rl": stage.inputs["rl"], "train": stage.inputs["train"]},
        )
        learner = Learner(work.open_engine(work, group), work.out, card, work.make_rows, work.config)
        played = continued(run_card(work, chat), work.out / EPISODES / LINES)
        played.write(work.out / EPISODES)
        try:
            asyncio.run(_train(work, learner, players, on_step))
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"the same command continues after batch {learner.version}")
            raise
        except Diverged:
            _ensure_checkpoint(work, learner)
            raise
        _ensure_checkpoint(work, learner)
        finish(played, work.out / EPISODES / LINES)
    counts = msgspec.structs.asdict(learner.buffer.counts)
    outputs = {"step": learner.card.step, "metrics": learner.card.metrics, **counts}
    stage.write(work.out, status="finished", outputs=stage.outputs | outputs)
    return learner.card


def run_card(work: Learning, chat: ChatFormat) -> Stage:
    """Return the card of the episodes of a training: they form a run, which can be replayed and viewed."""
    first = work.setups[0]
    counted, spoken = counted_with(chat)
    hashes = {"env": env_hash(work.config.env), **counted}
    card = run_stage(work.config, first.policy, {}, absolute_index(first.retriever), hashes, spoken)
    played = {"datasets": list(work.datasets), "split": work.split} if work.datasets else {}
    return msgspec.structs.replace(card, outputs={**card.outputs, **played})


def _ensure_checkpoint(work: Learning, learner: Learner) -> None:
    """Write the present weights as the checkpoint, unless a validation chose one."""
    if not (work.held_out and (work.out / CHECKPOINT).is_file()):
        learner.write_checkpoint({})


async def _train(work: Learning, learner: Learner, players: OpenRollouts, on_step: StepListener) -> None:
    """Train to the end. An interrupt waits for the batch in training, and saves the state."""
    on_step(learner.version, work.config.batches, {})
    async with players as rollouts:
        with (
            EpisodeStore(work.out / EPISODES) as store,
            TrainLog(work.out, learner.logged, work.trackers) as log,
        ):
            loop = _Loop(work, learner, rollouts, log, on_step)
            async with work.undisturbed():
                pass  # so that a sampler that cannot sleep is known now, and one that was left asleep is awake
            await loop.publish()
            if learner.validated < 0:
                await loop.validate()
            rl = work.config.rl
            stream = TaskStream(work.tasks, rl.samples, rl.seed)
            async with RolloutProducer(rollouts, stream, learner.buffer, store.append, learner.version) as producer:
                try:
                    await loop.batches(producer)
                except asyncio.CancelledError:
                    learner.save()
                    raise


class _Loop:
    """The steps of a training run: wait for a batch, train, publish, validate. Between them it can be interrupted."""

    def __init__(
        self, work: Learning, learner: Learner, rollouts: Rollouts, log: TrainLog, on_step: StepListener
    ) -> None:
        self._work, self._learner, self._rollouts = work, learner, rollouts
        self._log, self._on_step = log, on_step
        self._golds = {_key(placed.task): placed.task.gold for placed in (*work.tasks, *work.held_out)}
        self._counted = learner.buffer.counts
        self._saves = SavePlan(work.config.train)

    async def batches(self, producer: RolloutProducer) -> None:
        """Train batch by batch, to the last one, for the time given, or until validations stop improving."""
        learner, train = self._learner, self._work.config.train
        while True:
            late = time.monotonic() >= self._work.ends_at
            if late and not learner.version:
                raise UsageError("the time was up before the first batch was trained: give more --minutes")
            ends = late or learner.version == self._work.config.batches
            if learner.validated < learner.version and (ends or is_due(learner.version, train.watch.every)):
                await self.validate()
            ends = ends or 0 < train.watch.patience <= learner.best.stale
            if ends or (learner.version > learner.begun and self._saves.is_due(learner.version)):
                learner.save()
                self._saves.saved()
            if ends:
                return
            await self._batch(producer)

    async def _batch(self, producer: RolloutProducer) -> None:
        """Wait for a batch, train on it, publish and log. Once training begins, an interrupt is raised at the end."""
        learner, began = self._learner, time.perf_counter()
        groups = await producer.batch()
        waited = time.perf_counter() - began
        seen = batch_metrics(groups, learner.version, self._gold)
        async with self._work.undisturbed():
            trained, interrupt = await _in_thread(partial(learner.train, groups))
        stepped = time.perf_counter() - began - waited
        if interrupt is None:
            try:
                await self.publish()
            except asyncio.CancelledError as error:  # a resumed training publishes again
                interrupt = error
        producer.release(learner.version)
        seconds = {"wait_seconds": waited, "train_seconds": stepped, "seconds": time.perf_counter() - began}
        self._report(trained | seen | self._group_counts() | seconds)
        if interrupt is not None:
            raise interrupt

    async def publish(self) -> None:
        """Give the present weights to the rollouts."""
        await self._learner.engine.publish(self._learner.version, self._rollouts.publish)

    async def validate(self) -> None:
        """Play the held-out tasks, and write a checkpoint if the result is the best so far. Where faults broke an
        episode, the result is only logged: a mean over other tasks is another measure."""
        learner = self._learner
        if self._work.held_out:
            episodes = await self._held_out_episodes()
            broken = sum(map(_is_broken, episodes))
            found = episode_metrics(episodes, self._gold)
            shown = found | ({"faults": float(broken)} if broken else {})
            self._report({f"{VALIDATION_PREFIX}{name}": value for name, value in shown.items()})
            # The start is validated for comparison, and is never a checkpoint.
            if learner.version and not broken and learner.best.take(found):
                learner.write_checkpoint(found)
        learner.validated = learner.version

    async def _held_out_episodes(self) -> list[Episode]:
        """Play the held-out tasks; those that a fault broke, once more."""
        seed = self._work.config.rl.seed
        jobs = [EpisodeJob(placed.task, seed=seed, setup=placed.setup) for placed in self._work.held_out]
        first: list[Episode] = []
        await self._rollouts.run(jobs, first.append)
        broken = {_key(each.task) for each in first if _is_broken(each)}
        episodes = [each for each in first if not _is_broken(each)]
        if broken:
            await self._rollouts.run([job for job in jobs if _key(job.task) in broken], episodes.append)
        return sorted(episodes, key=lambda each: each.task.task_id)

    def _report(self, values: dict[str, float]) -> None:
        self._log.write(self._learner.version, values)
        self._on_step(self._learner.version, self._work.config.batches, values)

    def _group_counts(self) -> dict[str, float]:
        """Return the counts of groups so far, and the share of those since the last batch that had no signal."""
        before, self._counted = self._counted, self._learner.buffer.counts
        now = self._counted
        return {
            "zero_variance": (now.filtered - before.filtered) / max(1, now.produced - before.produced),
            **{f"groups/{name}": float(value) for name, value in msgspec.structs.asdict(now).items()},
        }

    def _gold(self, episode: Episode) -> Gold | None:
        return self._golds[_key(episode.task)]


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


def _is_broken(episode: Episode) -> bool:
    return episode.status is Status.INFRA_ERROR


def _key(task: Task) -> tuple[str, str]:
    """Return a key of a task; the id alone may occur in several datasets."""
    return task.task_id, task.query
