"""Reinforcement learning: tasks and a policy in, a better policy out."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from harness1.config import Config
from harness1.env.environment import env_hash
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.model_folder import folder_hash
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.models.formats.chat_format import ChatFormat
from harness1.records import Episode, Gold, Task
from harness1.retrieval.open import absolute_index
from harness1.rl.batch_metrics import batch_metrics, episode_metrics
from harness1.rl.buffer import Buffer, BufferState
from harness1.rl.producer import RolloutProducer
from harness1.rl.reference import row_logprobs, with_kl
from harness1.rl.rollouts import EpisodeGroup, Rollouts
from harness1.rl.start_gate import check_start
from harness1.rl.task_stream import PlacedTask, TaskStream
from harness1.rl.training_rows import substeps, training_rows
from harness1.rows.row import TrainRow
from harness1.runs.files import refuse_full_disk
from harness1.runs.folder import run_stage
from harness1.runs.stage import Stage, read_stage, refuse_foreign, refuse_other, under_way
from harness1.runs.store import EpisodeStore
from harness1.train.algorithm import make_algorithm
from harness1.train.log import VALIDATION_PREFIX, StepListener, TrainLog
from harness1.train.lora import merged_state
from harness1.train.saving import parameters_of, read_state, write_model, write_state
from harness1.train.schedule import is_due
from harness1.train.trainable import load_trainable
from harness1.train.trainer import Diverged, Trainer
from harness1.train.validation import Best

VERB = "rl train"
STATE = Path("state", "state.pt")
EPISODES = "episodes"
OpenRollouts = AbstractAsyncContextManager[Rollouts]
MakeRows = Callable[[Sequence[EpisodeGroup], Config], list[TrainRow]]


@dataclass(frozen=True)
class Learning:
    """What is to be done. Settings are those of `config.rl` and `config.train`.

    Args:
        tasks: to learn from, with their gold; `held_out` ones are watched.
        benches: what they are played on.
        base: the folder of the model that training begins with.
    """

    tasks: Sequence[PlacedTask]
    held_out: Sequence[PlacedTask]
    setups: Sequence[EpisodeSetup]
    base: Path
    out: Path
    config: Config
    device: str = "cpu"
    tensorboard: bool = False
    wandb: str = ""
    index_hashes: Sequence[str] = ()
    """Of what the benches search."""
    make_rows: MakeRows = field(default=lambda groups, config: training_rows(groups, config.rl, config.env))
    """How rows are made of groups; for experiments."""

    def check(self) -> None:
        """Everything that can be checked before a model is loaded.

        Raises:
            UsageError: there are no tasks, the model lies where the checkpoint goes, the settings do not fit each
                other, or the disk is too full.
        """
        train = self.config.train
        if not self.tasks:
            raise UsageError("there are no tasks to learn from")
        if self.base.resolve().is_relative_to(self.out.resolve()):
            raise UsageError(f"{self.base} is read, and lies in --out: choose another --out")
        if train.watch.metric not in ("reward", "curated_recall"):
            raise UsageError("rl train chooses by episodes: set train.watch.metric to reward or curated_recall")
        size = 2 * 4 + 2 * (1 if train.lora.rank else 12)
        refuse_full_disk(self.out, parameters_of(self.base) * size)

    def is_done(self, policy_hash: str) -> bool:
        """Whether the checkpoint is there, of this very work."""
        return (self.out / CHECKPOINT).is_file() and self.stage(policy_hash).is_done(self.out)

    def stage(self, policy_hash: str) -> Stage:
        """The card of the work; equal work has an equal card.

        Args:
            policy_hash: of the policy that training begins with.
        """
        config = self.config
        inputs = {
            "tasks": digest([(placed.task, placed.setup) for placed in self.tasks]),
            "held_out": digest([(placed.task, placed.setup) for placed in self.held_out]),
            "model": folder_hash(self.base),
            "policy": policy_hash,
            "indexes": list(self.index_hashes),
            "env": digest(config.env),
            "reward": config.reward_hash,
            "rl": msgspec.to_builtins(config.rl),
            "train": msgspec.to_builtins(config.train),
        }
        return Stage(VERB, inputs)


def learn(
    work: Learning, players: OpenRollouts, chat: ChatFormat, policy_hash: str, on_step: StepListener
) -> Checkpoint:
    """Train, and write the best checkpoint by `train.watch.metric` into `work.out`; go on where an earlier run stopped.

    Args:
        players: gives who plays, within the event loop of the training; they begin with the weights of `work.base`.
        chat: the format that the policy speaks.

    Raises:
        UsageError: as `Learning.check`; the folder holds something else or cannot be written; what was sampled is not
            what is trained; or no group has anything to learn from.
        Diverged: a loss is no number; the best checkpoint until then is kept.
        InfrastructureFault: nothing but broken episodes comes.
    """
    work.check()
    stage = work.stage(policy_hash)
    refuse_other(stage, work.out, "training")
    with under_way(stage, work.out):
        card = Checkpoint(
            format=chat.name,
            counter=chat.hash,
            env=msgspec.to_builtins(work.config.env),
            env_hash=env_hash(work.config.env),
            base=stage.inputs["model"],
            dataset={"tasks": stage.inputs["tasks"]},
            train={"rl": stage.inputs["rl"], "train": stage.inputs["train"]},
        )
        run = _Run(work, card)
        run_card(work, chat).write(work.out / EPISODES)
        asyncio.run(run.run(players, on_step))
        run_card(work, chat).write(work.out / EPISODES, status="finished")
    counts = msgspec.structs.asdict(run.buffer.counts)
    stage.write(work.out, status="finished", outputs={"step": run.card.step, "metrics": run.card.metrics, **counts})
    return run.card


def run_card(work: Learning, chat: ChatFormat) -> Stage:
    """The card of the episodes that a training plays, which are a run like others: they can be replayed and looked
    at."""
    first = work.setups[0]
    hashes = {"env": env_hash(work.config.env), "counter": chat.hash, "tokenizer": chat.tokenizer.hash}
    return run_stage(work.config, first.policy, {}, absolute_index(first.retriever), hashes, {"format": chat.name})


def clear_learning(out: Path) -> None:
    """Remove an earlier training, whole.

    Raises:
        UsageError: the folder holds something else.
    """
    refuse_foreign(out, VERB)
    if read_stage(out) is not None:
        shutil.rmtree(out)


class _Run:
    """The learner, with what it carries from batch to batch."""

    rollouts: Rollouts

    def __init__(self, work: Learning, card: Checkpoint) -> None:
        config = work.config
        self.work, self.config, self.card = work, config, card
        rl, train = config.rl, config.train
        self.buffer: Buffer[EpisodeGroup] = Buffer(rl.groups, rl.staleness, rl.window)
        self.stream = TaskStream(work.tasks, rl.samples, rl.seed)
        self.golds = {_key(placed.task): placed.task.gold for placed in (*work.tasks, *work.held_out)}
        model = load_trainable(work.base, train, work.device, config.machine.model.threads)
        self.trainer = Trainer(model, make_algorithm(rl.algorithm, rl), train, rl.batches * rl.substeps)
        self.reference = load_trainable(work.base, train, work.device) if rl.kl else None
        self.best = Best(train.watch.metric)
        self.version, self.validated = 0, -1
        if (state := read_state(work.out / STATE)) is not None:
            self.trainer.load_state(state["trainer"])
            self.buffer.load_state(msgspec.convert(state["buffer"], BufferState))
            self.best = Best(**state["best"])
            self.card = msgspec.convert(state["card"], Checkpoint)
            self.version, self.validated = state["version"], state["looked"]
        self._begun, self._counted = self.version, self.buffer.counts
        # Adapters are merged into rounded weights: after some steps what is sampled is not exactly what is trained.
        self._rounds = train.lora.rank > 0 and train.dtype == "bfloat16"
        self._stepping = self._interrupted = False

    async def run(self, players: OpenRollouts, on_step: StepListener) -> None:
        begun = self.version
        on_step(begun, self.config.rl.batches, {})
        async with players as self.rollouts:
            # The store is locked, and so keeps a second process from the log.
            with EpisodeStore(self.work.out / EPISODES) as store, self._log(begun) as log:
                await self._publish()
                if self.validated < 0:
                    await self._validate(log, on_step)
                generation = RolloutProducer(self.rollouts, self.stream, self.buffer, store.append)
                generation.version = begun
                try:
                    async with generation:
                        await self._batches(generation, log, on_step)
                except Diverged:
                    self._write_last()
                    raise
        self._write_last()

    async def _batches(self, generation: RolloutProducer, log: TrainLog, on_step: StepListener) -> None:
        """All batches. What is interrupted is saved as it stands."""
        try:
            await self._each_batch(generation, log, on_step)
        except asyncio.CancelledError:
            if not self._stepping:
                self._save()
            raise

    async def _each_batch(self, generation: RolloutProducer, log: TrainLog, on_step: StepListener) -> None:
        batches, train = self.config.rl.batches, self.config.train
        while True:
            ends = self.version == batches
            if self.validated < self.version and (ends or is_due(self.version, train.watch.every)):
                await self._validate(log, on_step)
            ends = ends or self._stops()
            if ends or (self.version > self._begun and is_due(self.version, train.save_every)):
                self._save()
            if ends:
                return
            values = await self._batch(generation)
            log.write(self.version, values)
            on_step(self.version, batches, values)
            if self._interrupted:
                raise asyncio.CancelledError

    async def _batch(self, generation: RolloutProducer) -> dict[str, float]:
        """One batch: wait for its groups, step, publish."""
        began = time.perf_counter()
        groups = await generation.batch()
        waited = time.perf_counter() - began
        seen = batch_metrics(groups, self.version, self._gold)
        trained = await self._stepped(groups)
        stepped = time.perf_counter() - began - waited
        if not self._interrupted:
            try:
                await self._publish()
            except asyncio.CancelledError:  # whoever resumes publishes again
                self._interrupted = True
        generation.release(self.version)
        self._stepping = False
        before, counts = self._counted, self.buffer.counts
        self._counted = counts
        return {
            **trained,
            **seen,
            "zero_variance": (counts.filtered - before.filtered) / max(1, counts.produced - before.produced),
            **{f"groups/{name}": float(value) for name, value in msgspec.structs.asdict(counts).items()},
            "wait_seconds": waited,
            "train_seconds": stepped,
            "seconds": time.perf_counter() - began,
        }

    async def _stepped(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """Train on a batch, in a thread. An interrupt waits for its end, so that nothing is lost."""
        self._stepping = True
        stepping = asyncio.ensure_future(asyncio.to_thread(self._train, groups))
        try:
            trained = await asyncio.shield(stepping)
        except asyncio.CancelledError:
            self._interrupted = True
            trained = await stepping
        self.version += 1
        return trained

    def _train(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """The optimizer steps on a batch: the means of what they measured, the largest of what is a maximum."""
        rl = self.config.rl
        rows = self.work.make_rows(groups, self.config)
        kept: dict[str, float] = {}
        if self.version == self._begun and (self.version == 0 or not self._rounds):
            report = check_start(self.trainer, rows)
            kept |= {"gate/max_difference": report.max_difference, "gate/mean_k3": report.mean_k3}
        if self.reference is not None:
            known = row_logprobs(self.reference, rows, self.config.train)
            rows, kept["kl"] = with_kl(rows, known, rl.kl)
        values = [self.trainer.step(part) for part in substeps(rows, rl.substeps, rl.seed + self.version)]
        summed = ("trained_tokens",)
        for name in values[0]:
            each = [value[name] for value in values]
            kept[name] = sum(each) if name in summed else max(each) if name.endswith("_max") else fmean(each)
        kept["rows"] = float(len(rows))
        kept["tokens"] = float(sum(len(row.token_ids) for row in rows))
        return kept

    async def _publish(self) -> None:
        await self.rollouts.publish(merged_state(self.trainer.model), self.version)

    async def _validate(self, log: TrainLog, on_step: StepListener) -> None:
        """Play held-out tasks, and write a checkpoint if there was none better."""
        if not self.work.held_out:
            self.validated = self.version
            return
        episodes: list[Episode] = []
        seed = self.config.rl.seed
        jobs = [EpisodeJob(task=placed.task, seed=seed, setup=placed.setup) for placed in self.work.held_out]
        await self.rollouts.run(jobs, episodes.append)
        found = episode_metrics(sorted(episodes, key=lambda each: each.task.task_id), self._gold)
        named = {f"{VALIDATION_PREFIX}{name}": value for name, value in found.items()}
        log.write(self.version, named)
        on_step(self.version, self.config.rl.batches, named)
        # What was there before the first step is written down, and is no checkpoint.
        if self.version and self.best.take(found):
            self._write(found)
        self.validated = self.version

    def _gold(self, episode: Episode) -> Gold | None:
        return self.golds[_key(episode.task)]

    def _stops(self) -> bool:
        return 0 < self.config.train.watch.patience <= self.best.stale

    def _log(self, begun: int) -> TrainLog:
        return TrainLog(self.work.out, begun, tensorboard=self.work.tensorboard, wandb=self.work.wandb)

    def _write_last(self) -> None:
        """Where no look at held-out tasks chose a checkpoint, the present weights are it."""
        if not (self.work.held_out and (self.work.out / CHECKPOINT).is_file()):
            self._write({})

    def _write(self, metrics: dict[str, float]) -> None:
        self.card = msgspec.structs.replace(self.card, step=self.version, metrics=metrics)
        write_model(self.work.out, self.trainer.model, self.work.base, self.card)

    def _save(self) -> None:
        card: dict[str, Any] = msgspec.to_builtins(self.card)
        state = {
            "trainer": self.trainer.state(),
            "buffer": msgspec.to_builtins(self.buffer.state()),
            "best": asdict(self.best),
            "card": card,
            "version": self.version,
            "looked": self.validated,
        }
        write_state(self.work.out / STATE, state)


def _key(task: Task) -> tuple[str, str]:
    """Tasks of different datasets may have one id."""
    return task.task_id, task.query
