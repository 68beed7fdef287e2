"""Simulate a training run whose rollouts and trainer share a number of slots (GPUs), in virtual time.

The task stream, the producer and the buffer are those of `rl train`, and so is the order in which a batch is awaited,
trained on, published and released. Slots, model calls, tools and optimizer steps are simulated: a call has a work in
seconds, a slot serves up to `width` calls at full speed, and beyond it all share. Weights are published at no cost. An
episode stays on its slot, as on a worker of `harness1.rl.ray_rollouts`: a slot that leaves ends its calls in progress,
and its episodes go on when it is back. With `moving` calls move between slots at no cost, which nobody's engine can do:
an upper bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, log
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.slots import Slots
from benchmarks.virtual_time import run
from harness1.episodes.jobs import EpisodeJob, Jobs, OnEpisode
from harness1.records import Episode, Gold, Hashes, RewardRecord, Status, StopReason, Task
from harness1.rl.buffer import Buffer, BufferCounts
from harness1.rl.producer import RolloutProducer
from harness1.rl.rollouts import EpisodeGroup
from harness1.rl.task_stream import PlacedTask, TaskStream

SAMPLES, WINDOW, WITHOUT_SIGNAL = 8, 0.3, 0.25
"""Episodes in a group; `rl.window`; the share of groups in which all rewards are equal."""
CALL_S, CALL_SIGMA, TOOL_S, TOOL_SIGMA = 5.0, 0.8, 1.0, 1.0
"""Medians of the work of a call and of the wait for a tool, and the deviations of their logarithms."""
TURNS, TURNS_SIGMA, FEWEST, MOST = 11.0, 0.35, 5, 40
"""Turns of an episode: the median, the deviation of the logarithm (between tasks and again within one), the limits."""
MICRO_BATCHES = 16
"""Slots join an optimizer step between its micro-batches."""
TASKS = 1000


@dataclass(frozen=True)
class Setting:
    """What is to be done, and with how many slots.

    Args:
        ratio: the work of generating a batch over the work of training on it, in seconds of one slot.
        batch_s: the time of a batch if all slots always worked at full speed, in seconds.
        scaling: k slots train k ** scaling times as fast as one.
        switch_s: the time in which a slot passes from rollouts to training or back, each way.
    """

    slots: int = 8
    ratio: float = 2.0
    batch_s: float = 120.0
    scaling: float = 0.9
    switch_s: float = 0.0
    staleness: int = 1
    groups: int = 8
    moving: bool = False

    @property
    def width(self) -> float:
        """Calls that a slot serves at full speed."""
        work = self.groups * SAMPLES / (1 - WITHOUT_SIGNAL) * mean_work()
        return work / (self.slots * self.batch_s * self.ratio / (1 + self.ratio))

    @property
    def row_s(self) -> float:
        """Seconds in which one slot trains on a row, which is a turn."""
        return self.slots * self.batch_s / (1 + self.ratio) / (self.groups * SAMPLES * mean_turns())


@dataclass(frozen=True)
class Plan:
    """How slots are divided.

    Args:
        own: slots that always train.
        lent: slots that leave the rollouts when a batch is ready, and return after its step.
        starving: also lend slots that the rollouts do not need, as long as that shortens the step.
    """

    own: int
    lent: int = 0
    starving: bool = False
    in_turns: bool = False
    """Generate without staleness, and train on all slots."""

    def __str__(self) -> str:
        kind = "in turns" if self.in_turns else f"{self.own} own"
        return kind + (f", {self.lent} lent" if self.lent and not self.in_turns else "") + ", starving" * self.starving


@dataclass
class Outcome:
    """What a simulated training did."""

    rows: int
    """Trained on in the time measured."""
    measured_s: float
    staleness_max: int
    bound: int
    counts: BufferCounts
    begun: int
    live: int
    played: int
    training_share: float
    """Share of the time in which an optimizer step ran."""
    lent_share: float
    """Share of the slots' time that was lent, without the time of switching."""

    @property
    def rows_per_hour(self) -> float:
        return 3600 * self.rows / self.measured_s


class SimulatedRollouts:
    """`Rollouts` of episodes whose calls and waits are drawn by their seeds, so that every plan plays the same ones."""

    def __init__(self, slots: Slots, seed: int) -> None:
        self._slots, self._seed = slots, seed
        self.version = self.begun = 0

    @property
    def live(self) -> int:
        """Episodes in progress."""
        return sum(pool.live for pool in self._slots.pools)

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        assert not isinstance(jobs, Iterable)
        async with asyncio.TaskGroup() as group:
            async for job in jobs:
                group.create_task(self._play(job, on_episode))

    async def publish(self, state: Any, version: int) -> None:
        self.version = version

    async def _play(self, job: EpisodeJob, on_episode: OnEpisode) -> None:
        pool = self._slots.least_busy()
        pool.live += 1
        self.begun += 1
        begun, turns = self.version, list(turns_of(job))
        for call, tool in turns:
            await pool.serve(call)
            await asyncio.sleep(tool)
        pool.live -= 1
        on_episode(finished(job, self._seed, (begun, self.version), len(turns)))


def finished(job: EpisodeJob, seed: int, versions: tuple[int, int], turns: int) -> Episode:
    """Return the episode of a job, with a reward that differs within most groups."""
    has_signal = Random(f"{seed}/{job.group_id}/signal").random() >= WITHOUT_SIGNAL
    return Episode(
        episode_id=f"{job.sample_idx}",
        task=job.task.public(),
        sample_idx=job.sample_idx,
        group_id=job.group_id,
        stop_reason=StopReason.END_SEARCH,
        status=Status.COMPLETED,
        hashes=Hashes(env="", policy="", index=""),
        policy_versions=versions,
        reward=RewardRecord(float(has_signal and job.sample_idx % SAMPLES == 0)),
        counts={"turns": turns},
    )


class SimulatedTrainer:
    """Takes optimizer steps on the slots that a plan gives it."""

    def __init__(self, slots: Slots, rollouts: SimulatedRollouts, setting: Setting, plan: Plan) -> None:
        self._slots, self._rollouts, self._setting, self._plan = slots, rollouts, setting, plan
        self._lent = 0
        self._lending: list[asyncio.Task[None]] = []
        self._returning: asyncio.Task[None] | None = None
        self.lent_s = self.trained_s = 0.0

    async def step(self, rows: int) -> None:
        """Train on the rows of a batch."""
        clock, part = asyncio.get_running_loop().time, rows * self._setting.row_s / MICRO_BATCHES
        began = clock()
        if self._returning is not None:
            await self._returning
        self._lend(self._plan.lent - self._lent)
        for done in range(MICRO_BATCHES):
            self._lend_spare(part * (MICRO_BATCHES - done))
            while not self._slots.training:
                await (asyncio.gather(*self._lending) if self._lending else asyncio.sleep(1.0))
                self._lending.clear()
                self._lend_spare(part * MICRO_BATCHES)
            seconds = part / self._slots.training**self._setting.scaling
            self.lent_s += seconds * max(0, self._slots.training - self._plan.own)
            await asyncio.sleep(seconds)
        self.trained_s += clock() - began

    def give_back(self) -> None:
        """Begin to give back what is lent."""
        if self._lent:
            self._returning = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        slots, self._lent = self._lent, 0
        await asyncio.gather(*self._lending)
        self._lending.clear()
        await self._slots.give_back(slots, self._setting.switch_s)

    def _lend(self, slots: int) -> None:
        if slots > 0:
            self._lent += slots
            lend = self._slots.lend(slots, self._setting.switch_s, self._plan.starving)
            self._lending.append(asyncio.create_task(lend))

    def _lend_spare(self, left: float) -> None:
        """Lend what the live episodes leave idle, if the step then ends earlier by more than a switch.

        Args:
            left: seconds of one slot that remain of the step.
        """
        if not self._plan.starving:
            return
        call, tool = mean(CALL_S, CALL_SIGMA), mean(TOOL_S, TOOL_SIGMA)
        generating = self._rollouts.live * call / (call + tool)
        # Slots on their way count as lent at once, as `Slots.lend` does.
        spare = self._slots.rollouts - ceil(generating / self._setting.width)
        switch, scaling, now = self._setting.switch_s, self._setting.scaling, self._plan.own + self._lent
        if now and spare > 0:
            left -= switch * now**scaling
            spare *= left / now**scaling - left / (now + spare) ** scaling > switch
        self._lend(spare)


def simulated(setting: Setting, plan: Plan, batches: int, seed: int, warm: int = 4) -> Outcome:
    """Simulate a training.

    Args:
        batches: that are measured, after the `warm` first ones.
    """
    return run(_train(setting, plan, batches + warm, seed, warm))


async def _train(setting: Setting, plan: Plan, batches: int, seed: int, warm: int) -> Outcome:
    """Do as `harness1.rl.learning`: wait for a batch, train, publish, release."""
    slots = Slots(setting.slots - plan.own, plan.own, setting.width, setting.moving)
    rollouts = SimulatedRollouts(slots, seed)
    trainer = SimulatedTrainer(slots, rollouts, setting, plan)
    buffer: Buffer[EpisodeGroup] = Buffer(setting.groups, 0 if plan.in_turns else setting.staleness, WINDOW)
    played: list[Episode] = []
    stream = TaskStream(tasks(), SAMPLES, seed)
    clock, trained, staleness, began = asyncio.get_running_loop().time, 0, 0, 0.0
    async with RolloutProducer(rollouts, stream, buffer, played.append) as producer:
        for version in range(1, batches + 1):
            waiting = asyncio.create_task(producer.batch())
            await asyncio.wait({waiting}, timeout=0)
            if not waiting.done():
                trainer.give_back()
            episodes = [episode for group in await waiting for episode in group.episodes]
            staleness = max(staleness, *(producer.version - each.policy_versions[0] for each in episodes))
            rows = sum(each.counts["turns"] for each in episodes)
            await trainer.step(rows)
            await rollouts.publish(None, version)
            producer.release(version)
            if version == warm:
                began = clock()
            trained += rows * (version > warm)
        whole, counts = clock(), buffer.counts
    return Outcome(
        rows=trained,
        measured_s=whole - began,
        staleness_max=staleness,
        bound=buffer.bound,
        counts=counts,
        begun=rollouts.begun,
        live=rollouts.live,
        played=len(played),
        training_share=trainer.trained_s / whole,
        lent_share=trainer.lent_s / whole / setting.slots,
    )


def turns_of(job: EpisodeJob) -> Iterator[tuple[float, float]]:
    """Draw the work of each call of an episode and the wait for the tool after it. Episodes of one task are alike."""
    own = Random(f"{job.seed}")
    of_task = Random(job.task.task_id).gauss(0.0, TURNS_SIGMA)
    turns = TURNS * exp(of_task + own.gauss(0.0, TURNS_SIGMA))
    for _ in range(round(min(max(turns, FEWEST), MOST))):
        yield own.lognormvariate(log(CALL_S), CALL_SIGMA), own.lognormvariate(log(TOOL_S), TOOL_SIGMA)


def mean(median: float, sigma: float) -> float:
    """Return the mean of a log-normal variable."""
    return median * exp(sigma**2 / 2)


def mean_work() -> float:
    """Return the mean work of all calls of an episode, in seconds."""
    return mean_turns() * mean(CALL_S, CALL_SIGMA)


@lru_cache
def mean_turns() -> float:
    """Return the mean number of turns of an episode of the tasks."""
    stream = TaskStream(tasks(), 2, 0)
    return fmean(len(list(turns_of(job))) for index in range(TASKS) for job in stream.jobs(index))


@lru_cache
def tasks() -> list[PlacedTask]:
    """Return the tasks of the simulation."""
    gold = Gold(relevant={})
    return [PlacedTask(Task(f"task-{n}", f"question {n}", "train", gold)) for n in range(TASKS)]
