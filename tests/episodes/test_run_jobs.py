"""The two stages of jobs, in virtual time: a sleep takes none, and a wait that nothing would end is an error."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.episodes.jobs import Depths, return_unchanged, run_jobs
from tests.virtual_time import run

Plan = tuple[float, float]


@dataclass
class World:
    places: int = 1
    within: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    ended: list[Plan] = field(default_factory=list)
    taken: int = 0
    depths: list[Depths] = field(default_factory=list)

    async def work(self, stage: str, seconds: float) -> None:
        self.within[stage] += 1
        self.most[stage] = max(self.most[stage], self.within[stage])
        try:
            await asyncio.sleep(seconds)
        finally:
            self.within[stage] -= 1

    async def play(self, plan: Plan) -> Plan:
        await self.work("play", plan[0])
        return plan

    async def finish(self, plan: Plan) -> Plan:
        await self.work("finish", plan[1])
        return plan

    def source(self, plans: list[Plan]) -> Iterator[Plan]:
        for plan in plans:
            self.taken += 1
            yield plan

    async def process(self, plans: list[Plan], on_result: Callable[[Plan], None] | None = None) -> None:
        on_result = on_result or self.ended.append
        await run_jobs(self.source(plans), self.play, self.finish, on_result, self.places, self.depths.append)


def now() -> float:
    return asyncio.get_running_loop().time()


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), max_size=12), st.integers(1, 3))
def test_every_job_ends_once_and_no_bound_is_exceeded(plans: list[Plan], places: int) -> None:
    world = World(places)
    run(world.process(plans))
    assert Counter(world.ended) == Counter(plans)
    assert max(world.most.values(), default=0) <= places
    assert world.within.total() == sum(world.depths[0]().values()) == 0


def test_a_job_that_waits_to_be_finished_frees_its_place_until_as_many_wait() -> None:
    async def scenario() -> tuple[World, float]:
        world, began = World(), now()
        await world.process([(1.0, 1.0)] * 4)
        return world, now() - began

    world, took = run(scenario())
    assert took == pytest.approx(5.0)  # eight seconds without stages
    assert world.most == {"play": 1, "finish": 1}


def test_a_slow_consumer_slows_the_source_down() -> None:
    async def scenario() -> World:
        world = World()
        processing = asyncio.create_task(world.process([(1.0, 100.0)] * 10))
        await asyncio.sleep(50)
        assert dict(world.depths[0]()) == {"playing": 1, "waiting to be scored": 1, "being scored": 1}
        assert world.taken == 3
        processing.cancel()
        await asyncio.wait({processing})
        assert processing.cancelled()
        return world

    world = run(scenario())
    assert world.ended == []
    assert world.within.total() == 0


def test_a_source_may_be_asynchronous_and_empty() -> None:
    async def numbers(count: int) -> AsyncIterator[int]:
        for number in range(count):
            await asyncio.sleep(1)
            yield number

    ended: list[int] = []
    run(run_jobs(numbers(3), return_unchanged, return_unchanged, ended.append, 2))
    run(run_jobs(numbers(0), return_unchanged, return_unchanged, ended.append, 2))
    assert ended == [0, 1, 2]


def test_an_error_of_the_source_is_raised_when_the_jobs_it_gave_have_ended() -> None:
    def source() -> Iterator[Plan]:
        yield (5.0, 5.0)
        raise LookupError("no more")

    world = World(2)
    with pytest.raises(LookupError, match="no more"):
        run(run_jobs(source(), world.play, world.finish, world.ended.append, 2))
    assert world.ended == [(5.0, 5.0)]


@pytest.mark.parametrize("stage", ["play", "finish", "result"])
def test_an_error_of_a_job_or_of_the_consumer_cancels_the_others_and_closes_the_source(stage: str) -> None:
    closed: list[bool] = []

    async def source() -> AsyncIterator[Plan]:
        try:
            yield (1.0, 1.0)
            yield (9.0, 9.0)
            await asyncio.sleep(99)
        finally:
            closed.append(True)

    class Broken(World):
        async def work(self, at: str, seconds: float) -> None:
            await super().work(at, seconds)
            if at == stage:
                raise LookupError("broken")

    def refuse(plan: Plan) -> None:
        raise LookupError("refused")

    world = Broken(2)
    with pytest.raises(LookupError):
        run(run_jobs(source(), world.play, world.finish, refuse, 2))
    assert world.within.total() == 0
    assert closed == [True]
