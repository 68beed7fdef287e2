"""Groups of episodes: which task each is of, in what order they are trained on, who has them played, and the rows of a
policy gradient that they become: rewards become advantages, and calls become rows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from random import Random
from statistics import fmean, pstdev, stdev
from typing import Generic, Literal, TypeVar

import msgspec

from harness1.config import Rl
from harness1.episodes.jobs import EpisodeJob, OnEpisode
from harness1.errors import HarnessError, InfrastructureFault, UsageError
from harness1.plain import digest
from harness1.records import Episode, Record, Status, Task
from harness1.rl.rollouts import Rollouts
from harness1.rows import TrainRow, make_rows
from harness1.rows.calls import calls_for_rows
from harness1.training.log import GoldOf, episode_metrics


class PlacedTask(Record):
    """A task, and the position of the setup that it is played in."""

    task: Task
    setup: int = 0


def jobs_of_group(tasks: Sequence[PlacedTask], index: int, samples: int, seed: int) -> list[EpisodeJob]:
    """Return the jobs of a group, each with a number and a seed of its own in the whole training: of an endless
    sequence of tasks, shuffled anew in each pass, so that a resumed training finds its position by counting."""
    epoch, place = divmod(index, len(tasks))
    placed = tasks[_shuffle(len(tasks), seed, epoch)[place]]
    seeds = [int(digest([seed, index, sample])[:8], 16) >> 1 for sample in range(samples)]
    first, group = index * samples, str(index)
    return [EpisodeJob(placed.task, first + at, own, group, placed.setup) for at, own in enumerate(seeds)]


@lru_cache(maxsize=2)
def _shuffle(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    Random(f"{seed}/{epoch}").shuffle(order)
    return order


class EpisodeGroup(Record):
    """The finished episodes of one task, ordered by `sample_idx`; their rewards are compared only with each other."""

    index: int  # from 0, in the order in which groups are begun
    episodes: tuple[Episode, ...]


WINDOW = 0.3  # share of the open groups, oldest first, that training may take from; later ones wait (Forge)
Item = TypeVar("Item")
DropReason = Literal["filtered", "stale", "faulty"]


class BufferCounts(Record):
    """The counts of groups so far: `trained + filtered + stale + faulty + waiting == produced`, at all times."""

    produced: int = 0  # finished or dropped
    trained: int = 0  # released after training
    filtered: int = 0  # all rewards equal
    stale: int = 0  # too old to train on
    faulty: int = 0  # broken by the infrastructure
    waiting: int = 0  # ready, or taken and not yet released


class BufferState(Record):
    """The saved state of a buffer, without the groups that wait or are in flight: those are begun again."""

    oldest: int = 0  # the first group that is neither trained nor dropped
    beyond: tuple[int, ...] = ()  # the later groups that are trained or dropped
    fates: dict[str, int] = {}  # the numbers of trained, filtered, stale and faulty groups


class Buffer(Generic[Item]):
    """Keeps groups in order between the rollouts and the trainer, which takes batches of `groups`; generation may be
    ahead by `staleness` batches. `window` is a share of the capacity. Nothing in it waits: it belongs to one thread."""

    def __init__(self, groups: int, staleness: int = 0, window: float = WINDOW) -> None:
        self.groups, self.capacity = groups, (staleness + 1) * groups
        self.window = max(1, int(window * self.capacity)) if staleness else 1
        self._oldest = self._next = self._produced = 0
        self._beyond: set[int] = set()
        self._in_flight: set[int] = set()
        self._ready: dict[int, tuple[Item, int]] = {}
        self._taken: tuple[int, ...] = ()
        self._fates: Counter[str] = Counter()

    @property
    def bound(self) -> int:
        """The largest staleness that is trained on, in versions."""
        return (self.capacity + self.window - 2) // self.groups

    @property
    def counts(self) -> BufferCounts:
        return BufferCounts(produced=self._produced, waiting=len(self._ready) + len(self._taken), **self._fates)

    def begin(self) -> int | None:
        """Take a slot for the next group, and return its number, or None if there is no slot."""
        if len(self._in_flight) + len(self._ready) + len(self._taken) >= self.capacity:
            return None
        while self._next in self._beyond:
            self._next += 1
        self._in_flight.add(self._next)
        self._next += 1
        return self._next - 1

    def finish(self, index: int, item: Item, oldest_version: int) -> None:
        """Take in a group in flight (else KeyError) that can be trained on, with the oldest version among its calls."""
        self._in_flight.remove(index)
        self._ready[index] = item, oldest_version
        self._produced += 1

    def drop(self, index: int, reason: DropReason) -> None:
        self._in_flight.remove(index)
        self._produced += 1
        self._consume(index, reason)

    def take(self, version: int) -> list[Item] | None:
        """Take a batch to train weights of a version, oldest group first, or return None if there are too few. Ready
        groups beyond the bound are dropped. Raise RuntimeError if the last batch was not released."""
        if self._taken:
            raise RuntimeError("a batch is taken before the last one was released")
        for index in [each for each, (_, oldest) in self._ready.items() if version - oldest > self.bound]:
            del self._ready[index]
            self._consume(index, "stale")
        # All ready groups before the oldest group in flight can be taken; the window begins at that group.
        border = min(self._in_flight, default=self._next) + self.window
        chosen = sorted(index for index in self._ready if index < border)[: self.groups]
        if len(chosen) < self.groups:
            return None
        self._taken = tuple(chosen)
        return [self._ready.pop(index)[0] for index in chosen]

    def release(self) -> None:
        for index in self._taken:
            self._consume(index, "trained")
        self._taken = ()

    def state(self) -> BufferState:
        return BufferState(oldest=self._oldest, beyond=tuple(sorted(self._beyond)), fates=dict(self._fates))

    def load_state(self, state: BufferState) -> None:
        """Continue from a saved state, before anything is begun; groups neither trained nor dropped are begun again."""
        self._oldest = self._next = state.oldest
        self._beyond = set(state.beyond)
        self._fates, self._produced = Counter(state.fates), sum(state.fates.values())

    def _consume(self, index: int, fate: str) -> None:
        self._fates[fate] += 1
        self._beyond.add(index)
        while self._oldest in self._beyond:
            self._beyond.remove(self._oldest)
            self._oldest += 1


BARREN = 10  # training stops after this many batches' worth of groups without a usable one


class RolloutProducer:
    """Plays groups of tasks within `async with`, and puts those that can be trained on into the buffer, which decides
    when one is begun. It belongs to one event loop. `keep` is called with every finished episode."""

    def __init__(
        self, rollouts: Rollouts, tasks: Sequence[PlacedTask], rl: Rl, buffer: Buffer[EpisodeGroup], keep: OnEpisode
    ) -> None:
        self._rollouts, self._tasks, self._rl, self.buffer, self._keep = rollouts, tasks, rl, buffer, keep
        self._open: dict[int, list[Episode]] = {}
        self._useless = Counter[DropReason]()  # since the last usable group; `stale` ones, since the last batch
        self._fault = ""
        self._room, self._ready = asyncio.Event(), asyncio.Event()
        self._playing: asyncio.Task[None]

    async def __aenter__(self) -> RolloutProducer:
        self._playing = asyncio.create_task(self._rollouts.run(self._jobs(), self._take_in))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._playing.cancel()
        with suppress(asyncio.CancelledError, HarnessError):
            await self._playing

    async def batch(self, version: int) -> list[EpisodeGroup]:
        """Wait for the groups of the next batch, for weights of a version; raise HarnessError if an error ended the
        rollouts, all recent episodes were broken, or no group has anything to learn from."""
        while True:
            stale = self.buffer.counts.stale
            groups = self.buffer.take(version)
            if (dropped := self.buffer.counts.stale - stale) > 0:
                self._useless["stale"] += dropped
                self._room.set()
            if groups is not None:
                del self._useless["stale"]
                return groups
            self._check()
            self._ready.clear()
            waiting = asyncio.create_task(self._ready.wait())
            await asyncio.wait({waiting, self._playing}, return_when="FIRST_COMPLETED")
            waiting.cancel()

    def release(self) -> None:
        self.buffer.release()
        self._room.set()

    def _check(self) -> None:
        if self._playing.done():
            self._playing.result()
            raise RuntimeError("rollouts ended although their source of jobs has no end")
        limit = BARREN * self.buffer.groups
        stale, faulty, filtered = (self._useless[reason] for reason in ("stale", "faulty", "filtered"))
        if stale >= limit:
            raise InfrastructureFault(f"{stale} groups in a row have calls under old versions of the weights")
        if faulty + filtered < limit:
            return
        if faulty >= filtered:
            raise InfrastructureFault(f"{faulty} of {faulty + filtered} groups in a row broke; the last: {self._fault}")
        raise UsageError(
            f"in {filtered} of {faulty + filtered} groups in a row all episodes had the same reward: there is nothing"
            " to learn from. Begin with a policy that does better now and then, or with other tasks (harness1 rl check)"
        )

    async def _jobs(self) -> AsyncIterator[EpisodeJob]:
        while True:
            index = self.buffer.begin()
            if index is None:
                self._room.clear()
                await self._room.wait()
                continue
            self._open[index] = []
            for job in jobs_of_group(self._tasks, index, self._rl.samples, self._rl.seed):
                yield job

    def _take_in(self, episode: Episode) -> None:
        self._keep(episode)
        index = int(episode.group_id or 0)
        episodes = self._open[index]
        episodes.append(episode)
        if len(episodes) < self._rl.samples:
            return
        del self._open[index]
        group = EpisodeGroup(index, tuple(sorted(episodes, key=lambda each: each.sample_idx)))
        whole = trainable(group)
        if len(whole) < 2:
            self._useless["faulty"] += 1
            broken = (each for each in group.episodes if each not in whole)
            self._fault = next((each.error or each.untrainable or "" for each in broken), "")
            self.buffer.drop(index, "faulty")
        elif not has_signal(rewards_of(whole)):
            self._useless["filtered"] += 1
            self.buffer.drop(index, "filtered")
        else:
            del self._useless["faulty"], self._useless["filtered"]
            oldest = min(each.policy_versions[0] for each in whole)
            self.buffer.finish(index, msgspec.structs.replace(group, episodes=whole), oldest)
        self._room.set()
        self._ready.set()


Kind = Literal["center", "group_std", "batch_std", "leave_one_out"]
SAME = 1e-9  # rewards that differ by at most this count as equal
STD_EPSILON = 1e-4  # added to standard deviations, which divide by n - 1, as in TRL's GRPO


def has_signal(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group differ; otherwise all its advantages are 0."""
    return bool(rewards) and max(rewards) - min(rewards) > SAME


def advantages(groups: Sequence[Sequence[float]], kind: Kind) -> list[list[float]]:
    """Return the advantage of each episode, given the rewards of each group of a batch; a group of one has 0.

    - `center`: r - mean of the group (Dr. GRPO, arXiv 2503.20783).
    - `group_std`: `center`, divided by the standard deviation of the group's rewards (GRPO, arXiv 2402.03300).
    - `batch_std`: `center`, divided by the standard deviation of the centred rewards of all groups (REINFORCE++ with a
      baseline, arXiv 2501.03262), so that the difficulty of tasks has no effect.
    - `leave_one_out`: r - mean of the others in the group (RLOO, arXiv 2402.14740).
    """
    means = [fmean(rewards) if rewards else 0.0 for rewards in groups]
    centred = [[reward - mean for reward in rewards] for rewards, mean in zip(groups, means, strict=True)]
    if kind == "center":
        return centred
    if kind == "leave_one_out":  # r - (sum - r) / (n - 1) = n / (n - 1) * (r - mean)
        return [[value * len(values) / max(len(values) - 1, 1) for value in values] for values in centred]
    whole = [value for values in centred for value in values]
    scaled = []
    for values in centred:
        over = values if kind == "group_std" else whole
        deviation = (stdev(over) if len(over) > 1 else 0.0) + STD_EPSILON
        scaled.append([value / deviation for value in values])
    return scaled


def trainable(group: EpisodeGroup) -> tuple[Episode, ...]:
    """Return the episodes of a group that have a reward and log probabilities. The others, broken by the infrastructure
    or not scored, are left out of baselines and rows; episodes that the policy failed stay."""
    return tuple(
        episode
        for episode in group.episodes
        if episode.status is not Status.INFRA_ERROR and episode.reward is not None and episode.untrainable is None
    )


def rewards_of(episodes: Sequence[Episode]) -> list[float]:
    """Return the rewards of the episodes that have one."""
    return [episode.reward.total for episode in episodes if episode.reward is not None]


def training_rows(groups: Sequence[EpisodeGroup], rl: Rl) -> list[TrainRow]:
    """Make the rows of a whole batch, in the order of groups, of their episodes and of the turns. `group_id` is the
    group's index as text. Raise SchemaError if an episode lacks a part of a prompt."""
    ordered = sorted(groups, key=lambda group: group.index)
    sampled = [trainable(group) for group in ordered]
    earned = advantages([rewards_of(episodes) for episodes in sampled], rl.advantages)
    rows: list[TrainRow] = []
    for group, episodes, of_episodes in zip(ordered, sampled, earned, strict=True):
        for episode, gain in zip(episodes, of_episodes, strict=True):
            values = {f"{episode.episode_id}/{call.call_id}": gain for turn in episode.turns for call in turn.calls}
            rows += make_rows(calls_for_rows(episode), rl.rows, values, str(group.index))
    return rows


def substeps(rows: Sequence[TrainRow], count: int, seed: int | str) -> list[list[TrainRow]]:
    """Cut the rows of a batch, as `training_rows` orders them, into optimizer steps of whole groups, drawn by the seed;
    their sizes differ by one group at most. A batch of fewer groups makes fewer steps, none of them empty."""
    groups = [list(own) for _, own in groupby(rows, key=lambda row: row.group_id)]
    Random(f"substeps/{seed}").shuffle(groups)
    steps = min(count, len(groups))
    return [[row for group in groups[at::steps] for row in group] for at in range(steps)]


def batch_metrics(groups: Sequence[EpisodeGroup], version: int, gold_of: GoldOf) -> dict[str, float]:
    """Return the `episode_metrics` of a batch, and `reward_std` (mean deviation within a group), `staleness` (mean) and
    `staleness_max` of the groups, in versions before the one to train."""
    ages = [version - min(each.policy_versions[0] for each in group.episodes) for group in groups]
    within = [pstdev(each.reward.total for each in group.episodes if each.reward) for group in groups]
    return {
        **episode_metrics([each for group in groups for each in group.episodes], gold_of),
        "reward_std": fmean(within),
        "staleness": fmean(ages),
        "staleness_max": float(max(ages)),
    }
