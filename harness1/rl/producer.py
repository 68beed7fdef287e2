"""Produce groups of episodes for a training run, begun as the buffer has room, until the learner stops it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec

from harness1.episodes.jobs import EpisodeJob, OnEpisode
from harness1.errors import HarnessError, InfrastructureFault, UsageError
from harness1.records import Episode
from harness1.rl.advantages import has_signal
from harness1.rl.buffer import Buffer, DropReason
from harness1.rl.rollouts import EpisodeGroup, Rollouts
from harness1.rl.task_stream import TaskStream
from harness1.rl.training_rows import rewards_of, trainable

BARREN = 10
"""Training stops after this many batches' worth of groups without a usable one."""


class RolloutProducer:
    """Plays groups within `async with`, and keeps those that can be trained on. It belongs to one event loop.

    Args:
        buffer: decides when a group is begun and which ones make a batch.
        keep: called with every finished episode.
        version: the version of the weights that groups are begun with.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        stream: TaskStream,
        buffer: Buffer[EpisodeGroup],
        keep: OnEpisode,
        version: int = 0,
    ) -> None:
        self._rollouts, self._stream, self.buffer, self._keep = rollouts, stream, buffer, keep
        self._open: dict[int, list[Episode]] = {}
        self._begun: dict[int, int] = {}
        self._useless: Counter[DropReason] = Counter()
        """Groups dropped since the last usable one; for `stale`, since the last batch."""
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
        """Wait for the groups of the next step.

        Raises:
            HarnessError: an error ended the rollouts.
            InfrastructureFault: all recent episodes were broken.
            UsageError: no group has anything to learn from.
        """
        while (groups := self._taken()) is None:
            self._check()
            self._ready.clear()
            waiting = asyncio.create_task(self._ready.wait())
            await asyncio.wait({waiting, self._playing}, return_when="FIRST_COMPLETED")
            waiting.cancel()
        return groups

    def _taken(self) -> list[EpisodeGroup] | None:
        """Take a batch, if there is one. Stale groups that are dropped make room; many of them are a fault."""
        stale = self.buffer.counts.stale
        groups = self.buffer.take(self.version)
        if (dropped := self.buffer.counts.stale - stale) > 0:
            self._useless["stale"] += dropped
            self._room.set()
        if groups is not None:
            del self._useless["stale"]
        return groups

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
            self._open[index], self._begun[index] = [], self.version
            for job in self._stream.jobs(index):
                yield job

    def _take_in(self, episode: Episode) -> None:
        self._keep(episode)
        index = int(episode.group_id or 0)
        self._open[index].append(episode)
        if len(self._open[index]) == self._stream.samples:
            self._close(index, sorted(self._open.pop(index), key=lambda each: each.sample_idx))
            self._room.set()
            self._ready.set()

    def _close(self, index: int, episodes: list[Episode]) -> None:
        """Keep a whole group for training, or drop it, so that another begins in its place."""
        group = EpisodeGroup(index, self._begun.pop(index), tuple(episodes))
        whole = trainable(group)
        if len(whole) < 2:
            self._useless["faulty"] += 1
            self._fault = next((each.error or each.untrainable or "" for each in episodes if each not in whole), "")
            self.buffer.drop(index, "faulty")
        elif not has_signal(rewards_of(whole)):
            self._useless["filtered"] += 1
            self.buffer.drop(index, "filtered")
        else:
            del self._useless["faulty"], self._useless["filtered"]
            oldest = min(each.policy_versions[0] for each in whole)
            self.buffer.finish(index, msgspec.structs.replace(group, episodes=whole), oldest)
