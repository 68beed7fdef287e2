"""The buffer: equal to a slow simulator on random schedules, its bound tight, every group in exactly one counter."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from harness1.rl.groups import Buffer, BufferCounts, BufferState

SCHEDULES, STEPS = 8_000, 45
SETTINGS = [(1, 0, 0.3), (3, 0, 1.0), (1, 1, 0.0), (2, 1, 0.5), (1, 2, 0.7), (2, 2, 0.3), (1, 1, 1.0), (3, 1, 0.7)]
"""Groups of a batch, staleness, window."""
Played = tuple[int, int]  # what the tests put in: the number of a group and the version of its oldest call


class Line:
    """The reference: all groups that were ever begun stand in one line, and a batch is made by walking along it."""

    def __init__(self, groups: int, staleness: int, window: float) -> None:
        self.groups, self.slots = groups, groups * (staleness + 1)
        self.window = 1 if staleness == 0 else max(1, int(self.slots * window))
        extra = 0
        while extra * groups < self.window - 1:
            extra += 1
        self.bound = staleness + extra
        self.line: list[dict[str, Any]] = []

    def numbered(self, *states: str) -> list[int]:
        return [number for number, group in enumerate(self.line) if group["state"] in states]

    def begin(self, version: int) -> int | None:
        if len(self.numbered("playing", "ready", "taken")) == self.slots:
            return None
        self.line.append({"state": "playing", "oldest": version})
        return len(self.line) - 1

    def finish(self, number: int, oldest: int) -> None:
        self.line[number] = {"state": "ready", "oldest": oldest}

    def drop(self, number: int, reason: str) -> None:
        self.line[number]["state"] = reason

    def take(self, version: int) -> list[Played] | None:
        for number in self.numbered("ready"):
            if version - self.line[number]["oldest"] > self.bound:
                self.line[number]["state"] = "stale"
        chosen: list[int] = []
        while len(chosen) < self.groups:
            left = [number for number in self.numbered("playing", "ready") if number not in chosen]
            head = left[0] if left else 0
            near = [n for n in left if n < head + self.window and self.line[n]["state"] == "ready"]
            if not near:
                return None
            chosen.append(near[0])
        for number in chosen:
            self.line[number]["state"] = "taken"
        return [(number, self.line[number]["oldest"]) for number in chosen]

    def release(self) -> None:
        for number in self.numbered("taken"):
            self.line[number]["state"] = "trained"

    def counts(self) -> BufferCounts:
        ended = {state: len(self.numbered(state)) for state in ("trained", "filtered", "stale", "faulty")}
        waiting = len(self.numbered("ready", "taken"))
        return BufferCounts(produced=len(self.line) - len(self.numbered("playing")), waiting=waiting, **ended)


def compare(seed: int) -> int:
    """One random schedule on buffer and reference; the largest staleness that was trained on, where calls are no older
    than their groups."""
    draw = random.Random(seed)
    settings = SETTINGS[seed % len(SETTINGS)]
    buffer, line = Buffer[Played](*settings), Line(*settings)
    assert buffer.bound == line.bound
    version = largest = 0
    training = False
    patience, lag = draw.choice([0.0, 0.02, 0.5]), draw.choice([0, 0, 1, 4])
    for _ in range(STEPS):
        flying = line.numbered("playing")
        what = draw.random()
        if what < 0.35 or not flying:
            assert buffer.begin() == line.begin(version)
        elif what < 0.75:
            number = flying[0] if draw.random() < patience else draw.choice(flying[1:] or flying)
            if draw.random() < 0.2:
                reason = draw.choice(["filtered", "faulty"])
                buffer.drop(number, reason)
                line.drop(number, reason)
            else:
                oldest = line.line[number]["oldest"] - draw.randint(0, lag)
                buffer.finish(number, (number, oldest), oldest)
                line.finish(number, oldest)
        elif training:
            buffer.release()
            line.release()
            training, version = False, version + 1
        else:
            batch = buffer.take(version)
            assert batch == line.take(version)
            largest = max([largest, *(version - oldest for _, oldest in batch or ())])
            training = batch is not None
        counts = buffer.counts
        assert counts == line.counts()
        ended = counts.trained + counts.filtered + counts.stale + counts.faulty
        assert ended + counts.waiting == counts.produced
    assert largest <= buffer.bound
    assert lag or not counts.stale
    return 0 if lag else largest


def test_random_schedules_equal_the_reference() -> None:
    largest = [compare(seed) for seed in range(SCHEDULES)]
    for number, settings in enumerate(SETTINGS):
        assert max(largest[number :: len(SETTINGS)]) == Buffer[Played](*settings).bound


def test_the_bound_is_the_asked_staleness_and_what_the_window_adds() -> None:
    assert [Buffer[int](8, ahead, 0.0).bound for ahead in range(5)] == [0, 1, 2, 3, 4]
    made = [Buffer[int](8, *each) for each in ((0, 1.0), (1, 0.3), (3, 0.3), (3, 0.32))]
    assert [(each.window, each.bound) for each in made] == [(1, 0), (4, 2), (9, 4), (10, 5)]


@pytest.mark.parametrize("seed", range(5))
def test_a_resumed_buffer_begins_again_what_was_not_consumed(seed: int) -> None:
    """It is cut off anywhere, also with a batch taken; every group is trained or dropped exactly once."""
    draw, buffer = random.Random(seed), Buffer[int](2, 2, 0.5)
    ended: list[int] = []
    flying: list[int] = []
    for _ in range(300):
        while (number := buffer.begin()) is not None:
            flying.append(number)
        if flying:
            number = flying.pop(draw.randrange(len(flying)))
            if draw.random() < 0.3:
                buffer.drop(number, "filtered")
                ended.append(number)
            else:
                buffer.finish(number, number, 0)
        batch = buffer.take(0)
        if draw.random() < 0.2:
            buffer, flying = resumed(buffer), []
        else:
            buffer.release()
            ended += batch or []
    assert len(ended) == len(set(ended))
    assert set(range(buffer.state().oldest)) <= set(ended)
    assert buffer.counts.produced - buffer.counts.waiting == len(ended) > 100


def resumed(buffer: Buffer[int]) -> Buffer[int]:
    """Another buffer that goes on where this one stood, by way of a file."""
    state, counts = msgspec.json.decode(msgspec.json.encode(buffer.state()), type=BufferState), buffer.counts
    assert state.oldest not in state.beyond
    other = Buffer[int](2, 2, 0.5)
    other.load_state(state)
    assert other.state() == state
    assert other.counts == msgspec.structs.replace(counts, produced=counts.produced - counts.waiting, waiting=0)
    return other


def test_misuse_is_refused() -> None:
    buffer = Buffer[int](1, 1)
    with pytest.raises(KeyError):
        buffer.finish(0, 0, 0)
    with pytest.raises(KeyError):
        buffer.drop(0, "faulty")
    for number in (0, 1):
        buffer.begin()
        buffer.finish(number, number, 0)
    buffer.take(0)
    with pytest.raises(RuntimeError):
        buffer.take(0)
