"""Decide which groups are begun, and which of them the trainer takes next: a windowed first-in-first-out buffer.

Groups are numbered as they are begun. One is *in flight* until it is finished or dropped, *ready* until it is taken,
and *taken* until the trainer releases its batch; each of them holds one of `capacity = (staleness + 1) * groups` slots.
A batch is made one group at a time, as in Forge (MiniMax, arXiv 2605.26494, section 6.2.4): with H the oldest group
that is neither taken nor dropped, the oldest ready one among `[H, H + window - 1]` is next. So a slow group may be
overtaken, but by at most `window - 1` later ones. (These are the `window` entries of torchtitan's work buffer; a
window written `[H, H + W]` has one more. A batch is taken whole or not at all, and in the order of the groups' numbers;
torchtitan hands out groups as they finish.)

The staleness of a group is the trainer's version when it is taken, minus that of its oldest call. If each batch raises
the version by one, and its slots are released when the new weights are published, it is at most

    bound = (capacity + window - 2) // groups = staleness + ceil((window - 1) / groups)

because a group is begun with at most `capacity - 1` others before it (those of a batch being trained count here), and
at most `window - 1` after it are taken first. The bound is tight: a group that begins in the last slot, and stays in
flight until nothing else can be taken, reaches it. So `staleness` alone is the bound (ROLL's asynchronous ratio,
arXiv 2512.24873) when the window is 1, which is plain first-in-first-out; a wider window adds to it. If slots
were released when taken, it would be one more. If versions ever rise faster, a group beyond the bound is dropped.

With `staleness = 0` training and generation take turns: a batch is the first `groups` groups that are not dropped,
whatever finishes first, and all of it was begun at the trainer's version. The reason: a batch takes all slots, so no
group begins between the take and the release, and every group taken was begun since the last release. Let n groups have
been begun by then: `groups` are ready and the others dropped. Group n - 1 is not dropped; otherwise the ready groups
would have held all slots before it could begin. So n is the least number at which enough remain. The window has no
effect here and is 1.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, Literal, TypeVar

from harness1.records import Record

Item = TypeVar("Item")
DropReason = Literal["filtered", "stale", "faulty"]
"""All rewards equal; too old to train on; broken by the infrastructure."""


class BufferCounts(Record):
    """The counts of groups so far: `trained + filtered + stale + faulty + waiting == produced`, at all times."""

    produced: int = 0
    """Groups that were finished or dropped."""
    trained: int = 0
    """Released after training."""
    filtered: int = 0
    stale: int = 0
    faulty: int = 0
    waiting: int = 0
    """Ready, or taken and not yet released."""


class BufferState(Record):
    """The saved state of a buffer, without the groups that wait or are in flight: those are begun again."""

    oldest: int = 0
    """The first group that is neither trained nor dropped."""
    beyond: tuple[int, ...] = ()
    """The later groups that are trained or dropped."""
    fates: dict[str, int] = {}
    """The numbers of trained, filtered, stale and faulty groups."""


class Buffer(Generic[Item]):
    """Keeps groups in order between the rollouts and the trainer. It belongs to one thread, and nothing in it waits.

    Args:
        groups: the number of groups in a batch.
        staleness: the number of batches by which generation may be ahead of training.
        window: a share of the capacity, rounded down to whole groups, at least 1.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, groups: int, staleness: int = 0, window: float = 0.0) -> None:
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
        """Take a slot for the next group, and return its number, or None if there is no slot.

        Args:
            version: the version of the weights that it is begun with.
        """
        if len(self._in_flight) + len(self._ready) + len(self._taken) >= self.capacity:
            return None
        while self._next in self._beyond:
            self._next += 1
        index = self._next
        self._in_flight[index] = version
        self._next += 1
        return index

    def finish(self, index: int, item: Item, oldest_version: int | None = None) -> None:
        """Take in a group in flight that can be trained on.

        Args:
            oldest_version: the oldest version among its calls; None means the version that it was begun with.

        Raises:
            KeyError: it is not in flight.
        """
        begun = self._in_flight.pop(index)
        self._ready[index] = item, begun if oldest_version is None else oldest_version
        self._produced += 1

    def drop(self, index: int, reason: DropReason) -> None:
        """Drop a group in flight: another may begin in its place.

        Raises:
            KeyError: it is not in flight.
        """
        del self._in_flight[index]
        self._produced += 1
        self._consume(index, reason)

    def take(self, version: int) -> list[Item] | None:
        """Take a batch, oldest group first, or return None if there are too few. Ready groups beyond the bound are
        dropped.

        Args:
            version: the version of the weights to train.

        Raises:
            RuntimeError: the last batch was not released.
        """
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
        """Continue from a saved state; groups that were neither trained nor dropped are begun again.

        Raises:
            RuntimeError: groups were begun here already.
        """
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
