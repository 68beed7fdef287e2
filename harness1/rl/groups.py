"""Groups of episodes: which task each is of, in what order they are trained on, and who has them played."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import lru_cache
from random import Random
from typing import Generic, Literal, TypeVar

import msgspec

from harness1.episodes.jobs import EpisodeJob, OnEpisode
from harness1.errors import HarnessError, InfrastructureFault, UsageError
from harness1.plain import digest
from harness1.records import Episode, Record, Task
from harness1.rl.rollouts import EpisodeGroup, Rollouts
from harness1.rl.rows import has_signal, rewards_of, trainable


class PlacedTask(Record):
    """A task, and the position of the setup that it is played in."""

    task: Task
    setup: int = 0


class TaskStream:
    """An endless sequence of tasks, shuffled anew in each pass, each for a group of `samples` episodes. The task at a
    position depends on the arguments alone, so that a resumed training finds its position by counting."""

    def __init__(self, tasks: Sequence[PlacedTask], samples: int, seed: int) -> None:
        self._tasks, self.samples, self._seed = tasks, samples, seed
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def task(self, index: int) -> PlacedTask:
        """Return the task of a group, by its number."""
        epoch, place = divmod(index, len(self._tasks))
        return self._tasks[self._order(epoch)[place]]

    def jobs(self, index: int) -> list[EpisodeJob]:
        """Return the jobs of a group, each with a number and a seed of its own in the whole training."""
        placed = self.task(index)
        return [
            EpisodeJob(
                task=placed.task,
                sample_idx=index * self.samples + sample,
                seed=int(digest([self._seed, index, sample])[:8], 16) >> 1,
                group_id=str(index),
                setup=placed.setup,
            )
            for sample in range(self.samples)
        ]

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


WINDOW = 0.3
"""Share of the open groups, oldest first, that training may take from; later ones wait even if finished (Forge)."""
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
    ahead by `staleness` batches. `window` is a share of the capacity, rounded down to whole groups, at least 1. The
    buffer belongs to one thread, and nothing in it waits. Raise ValueError if a number is out of range."""

    def __init__(self, groups: int, staleness: int = 0, window: float = WINDOW) -> None:
        if groups < 1 or staleness < 0 or window < 0:
            raise ValueError(f"no buffer of {groups} groups, staleness {staleness} and window {window}")
        self.groups, self.capacity = groups, (staleness + 1) * groups
        self.window = max(1, int(window * self.capacity)) if staleness else 1
        self._oldest = self._next = self._produced = 0
        self._beyond: set[int] = set()
        self._in_flight: dict[int, int] = {}
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

    def begin(self, version: int) -> int | None:
        """Take a slot for the next group, and return its number, or None if there is no slot; `version` is that of the
        weights that it is begun with."""
        if len(self._in_flight) + len(self._ready) + len(self._taken) >= self.capacity:
            return None
        while self._next in self._beyond:
            self._next += 1
        index = self._next
        self._in_flight[index] = version
        self._next += 1
        return index

    def finish(self, index: int, item: Item, oldest_version: int | None = None) -> None:
        """Take in a group in flight that can be trained on; raise KeyError if it is not in flight. The oldest version
        among its calls may be None for the version that it was begun with."""
        begun = self._in_flight.pop(index)
        self._ready[index] = item, begun if oldest_version is None else oldest_version
        self._produced += 1

    def drop(self, index: int, reason: DropReason) -> None:
        """Drop a group in flight: another may begin in its place; raise KeyError if it is not in flight."""
        del self._in_flight[index]
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
        """Free the slots of the batch that was taken, after its training and the publication of the weights."""
        for index in self._taken:
            self._consume(index, "trained")
        self._taken = ()

    def state(self) -> BufferState:
        return BufferState(oldest=self._oldest, beyond=tuple(sorted(self._beyond)), fates=dict(self._fates))

    def load_state(self, state: BufferState) -> None:
        """Continue from a saved state; groups that were neither trained nor dropped are begun again; raise RuntimeError
        if groups were begun here already."""
        if self._next:
            raise RuntimeError("a buffer in use cannot load a state")
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
    """Plays groups within `async with`, and puts those that can be trained on into the buffer, which decides when one
    is begun. It belongs to one event loop. `keep` is called with every finished episode; groups are begun with
    `version`."""

    def __init__(
        self, rollouts: Rollouts, stream: TaskStream, buffer: Buffer[EpisodeGroup], keep: OnEpisode, version: int = 0
    ) -> None:
        self._rollouts, self._stream, self.buffer, self._keep = rollouts, stream, buffer, keep
        self._open: dict[int, tuple[int, list[Episode]]] = {}
        self._useless: Counter[DropReason] = (
            Counter()
        )  # since the last usable group; `stale` ones, since the last batch
        self._fault = ""
        self._room, self._ready = asyncio.Event(), asyncio.Event()
        self._playing: asyncio.Task[None]
        self.version = version

    async def __aenter__(self) -> RolloutProducer:
        self._playing = asyncio.create_task(self._rollouts.run(self._jobs(), self._take_in))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._playing.cancel()
        with suppress(asyncio.CancelledError, HarnessError):
            await self._playing

    async def batch(self) -> list[EpisodeGroup]:
        """Wait for the groups of the next step; raise HarnessError if an error ended the rollouts; InfrastructureFault
        if all recent episodes were broken; UsageError if no group has anything to learn from."""
        while True:
            stale = self.buffer.counts.stale
            groups = self.buffer.take(self.version)
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

    def release(self, version: int) -> None:
        """Free the places of a batch that was trained on, after its weights were published as `version`."""
        self.version = version
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
            index = self.buffer.begin(self.version)
            if index is None:
                self._room.clear()
                await self._room.wait()
                continue
            self._open[index] = self.version, []
            for job in self._stream.jobs(index):
                yield job

    def _take_in(self, episode: Episode) -> None:
        """Keep a whole group for training, or drop it, so that another begins in its place."""
        self._keep(episode)
        index = int(episode.group_id or 0)
        version, episodes = self._open[index]
        episodes.append(episode)
        if len(episodes) < self._stream.samples:
            return
        del self._open[index]
        group = EpisodeGroup(index, version, tuple(sorted(episodes, key=lambda each: each.sample_idx)))
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
