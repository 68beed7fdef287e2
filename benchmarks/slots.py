"""Simulated slots (GPUs) that serve the calls of episodes, or train."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count


class Pool:
    """Slots that share their calls. All calls in progress advance at one rate, so each ends when a clock of that rate
    has passed its work."""

    def __init__(self, slots: int, width: float) -> None:
        self._slots, self._width, self.live = slots, width, 0
        self._served, self._since = 0.0, 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    async def serve(self, work: float) -> None:
        """Wait until a call is answered.

        Args:
            work: its seconds at full speed.
        """
        await self._open.wait()
        self._advance()
        done = self._loop.create_future()
        heapq.heappush(self._ends, (self._served + work, next(self._numbers), done))
        self._idle.clear()
        self._plan()
        await done

    async def close(self) -> None:
        """Hold new calls back, and wait until those in progress end."""
        self._open.clear()
        await self._idle.wait()

    def open(self) -> None:
        """Serve calls again."""
        self._open.set()

    def resize(self, change: int) -> None:
        """Add slots, or remove some at once."""
        self._advance()
        self._slots += change
        self._plan()

    @property
    def _rate(self) -> float:
        return min(1.0, self._slots * self._width / len(self._ends)) if self._ends else 0.0

    def _advance(self) -> None:
        now = self._loop.time()
        self._served += (now - self._since) * self._rate
        self._since = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._rate > 0:
            left = max(0.0, self._ends[0][0] - self._served)
            self._timer = self._loop.call_later(left / self._rate, self._end)

    def _end(self) -> None:
        self._advance()
        self._served = max(self._served, self._ends[0][0])
        while self._ends and self._ends[0][0] <= self._served:
            heapq.heappop(self._ends)[2].set_result(None)
        if not self._ends:
            self._idle.set()
        self._plan()


class Slots:
    """The slots that generate, and those that train.

    Args:
        width: calls that a slot serves at full speed.
        moving: whether calls move between slots; otherwise a slot that leaves ends its calls in progress.
    """

    def __init__(self, rollouts: int, training: int, width: float, moving: bool = False) -> None:
        self.rollouts, self.training, self._moving = rollouts, training, moving
        self.pools = [Pool(each, width) for each in ([rollouts] if moving else [1] * rollouts)]
        self._lent: list[Pool] = []

    def least_busy(self) -> Pool:
        """Return where the next episode is played."""
        return min(self.pools, key=lambda pool: pool.live)

    async def lend(self, slots: int, switch_s: float, idlest: bool = False) -> None:
        """Move slots from the rollouts to training: always the same ones, or those with the fewest episodes."""
        self.rollouts -= slots
        if self._moving:
            self.pools[0].resize(-slots)
        else:
            there = [pool for pool in self.pools if pool not in self._lent]
            there = sorted(there, key=lambda pool: pool.live)[:slots] if idlest else there[:slots]
            self._lent += there
            await asyncio.gather(*(pool.close() for pool in there))
        await asyncio.sleep(switch_s)
        self.training += slots

    async def give_back(self, slots: int, switch_s: float) -> None:
        """Move all slots that were lent back to the rollouts."""
        self.training -= slots
        await asyncio.sleep(switch_s)
        self.rollouts += slots
        if self._moving:
            self.pools[0].resize(slots)
        for pool in self._lent:
            pool.open()
        self._lent.clear()
