"""The stages of a pipeline, in virtual time: a sleep takes none, and a wait that nothing would end is an error."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import stages
from harness1.episodes.stages import Finished, Pipeline, StageFailure, StageLimits
from harness1.errors import ConfigError, InfrastructureFault
from tests.virtual_time import run

WORK = ("init", "run", "post")
ONE = StageLimits(init=1, ready=1, run=1, post=1)


@dataclass(frozen=True)
class Plan:
    """What happens to a job: how long each stage takes, where it fails, and what `run` keeps after a second."""

    number: int = 0
    init: float = 1.0
    run: float = 1.0
    post: float = 1.0
    fault: str = ""
    keeps: bool = False


@dataclass
class World:
    """Stage functions that do as planned and count; `ended` holds every result."""

    limits: StageLimits = ONE
    hand_over_s: float = 0.0
    within: Counter[str] = field(default_factory=Counter)
    begun: Counter[tuple[str, int]] = field(default_factory=Counter)
    ended: list[tuple[Plan, Finished[Any] | StageFailure]] = field(default_factory=list)
    posted: set[int] = field(default_factory=set)
    prepared: set[int] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)
    """What was wrong within a stage, where an assertion would be one more fault."""
    taken: int = 0

    def __post_init__(self) -> None:
        self.pipeline = Pipeline(self.limits, self.init, self.run, self.post, self.on_result)

    async def init(self, plan: Plan) -> Plan:
        await self.work("init", plan, plan.init)
        self.prepared.add(plan.number)
        self.expect(len(self.prepared) <= self.limits.init + self.limits.ready + self.limits.run, "prepared")
        return plan

    async def run(self, plan: Plan, keep: Callable[[tuple[Plan, str]], None]) -> tuple[Plan, str]:
        try:
            if plan.keeps:
                await asyncio.sleep(1)
                keep((plan, "nothing"))
                keep((plan, "part"))
            await self.work("run", plan, plan.run)
            return plan, "whole"
        finally:
            self.prepared.discard(plan.number)

    async def post(self, ran: tuple[Plan, str]) -> str:
        plan, result = ran
        await self.work("post", plan, plan.post)
        self.posted.add(plan.number)
        return result

    async def work(self, stage: str, plan: Plan, seconds: float) -> None:
        self.begun[stage, plan.number] += 1
        self.expect(self.begun[stage, plan.number] == 1, f"{stage} twice")
        self.within[stage] += 1
        self.expect(self.within[stage] <= getattr(self.limits, stage), stage)
        try:
            await asyncio.sleep(seconds)
            if plan.fault == stage:
                raise InfrastructureFault(f"{stage} is down")
        finally:
            self.within[stage] -= 1

    def expect(self, holds: bool, what: str) -> None:
        self.broken += [] if holds else [what]

    async def on_result(self, plan: Plan, outcome: Finished[Any] | StageFailure) -> None:
        self.prepared.discard(plan.number)
        await asyncio.sleep(self.hand_over_s)
        self.ended.append((plan, outcome))

    def source(self, plans: list[Plan]) -> Iterator[Plan]:
        for plan in plans:
            self.taken += 1
            yield plan

    def outcome(self, number: int = 0) -> Finished[Any] | StageFailure:
        (found,) = [outcome for plan, outcome in self.ended if plan.number == number]
        return found

    async def process(self, plans: list[Plan]) -> float:
        try:
            return await self.pipeline.process(self.source(plans))
        finally:
            assert not self.broken
            assert not any(self.within.values())

    async def process_and_cancel(self, plans: list[Plan], at: float, number: int) -> None:
        """Cancel one job at a time."""
        asyncio.get_running_loop().call_later(at, self.pipeline.cancel, lambda plan: plan.number == number)
        await self.process(plans)


durations = st.sampled_from([0.0, 0.3, 1.0, 2.5])
plans = st.lists(
    st.builds(
        Plan,
        init=durations,
        run=durations,
        post=durations,
        fault=st.sampled_from(["", "", "", *WORK]),
        keeps=st.booleans(),
    ),
    max_size=14,
).map(lambda drawn: [Plan(**{**vars(plan), "number": number}) for number, plan in enumerate(drawn)])
bounds = st.builds(StageLimits, *[st.integers(1, 3)] * 4)


@settings(max_examples=60)
@given(plans, bounds, durations)
def test_every_job_ends_once_as_planned_and_no_bound_is_exceeded(
    drawn: list[Plan], limits: StageLimits, hand_over_s: float
) -> None:
    world = World(limits, hand_over_s)
    use = run(world.process(drawn))
    assert sorted(plan.number for plan, _ in world.ended) == [plan.number for plan in drawn]
    for plan, outcome in world.ended:
        if plan.fault:
            assert isinstance(outcome, StageFailure)
            assert (outcome.stage, outcome.kind) == (plan.fault, "fault")
        else:
            assert isinstance(outcome, Finished)
            assert (outcome.result, outcome.cut) == ("whole", None)
    assert not world.prepared
    assert 0 <= use <= 1 + 1e-9


@settings(max_examples=60)
@given(plans, bounds, durations, st.floats(0, 12))
def test_cancelling_the_pipeline_ends_all_stages_and_hands_over_what_was_through(
    drawn: list[Plan], limits: StageLimits, hand_over_s: float, at: float
) -> None:
    world = World(limits, hand_over_s)

    async def cancelled() -> bool:
        work = asyncio.create_task(world.process(drawn))
        await asyncio.sleep(at)
        through = not work.cancel()
        await asyncio.wait({work})
        assert through or work.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return work.cancelled()

    stopped = run(cancelled())
    numbers = [plan.number for plan, outcome in world.ended if isinstance(outcome, Finished)]
    assert set(numbers) == world.posted
    assert len({plan.number for plan, _ in world.ended}) == len(world.ended)
    assert all(outcome.kind == "fault" for _, outcome in world.ended if isinstance(outcome, StageFailure))
    assert stopped or len(world.ended) == len(drawn)


@settings(max_examples=60)
@given(plans, bounds, st.floats(0, 12), st.integers(0, 13))
def test_cancelling_a_job_anywhere_leaves_the_others_alone(
    drawn: list[Plan], limits: StageLimits, at: float, number: int
) -> None:
    world = World(limits)
    run(world.process_and_cancel(drawn, at, number))
    assert sorted(plan.number for plan, _ in world.ended) == [plan.number for plan in drawn]
    for plan, outcome in world.ended:
        if plan.number != number:
            assert isinstance(outcome, Finished) == (not plan.fault)


@pytest.mark.parametrize("stage", WORK)
def test_a_fault_ends_its_job_in_its_stage(stage: str) -> None:
    world = World()
    run(world.process([Plan(0, fault=stage), Plan(1)]))
    failure = world.outcome(0)
    assert isinstance(failure, StageFailure)
    assert (failure.stage, failure.kind) == (stage, "fault")
    assert failure.error == f"InfrastructureFault: {stage} is down"
    assert isinstance(failure.cause, InfrastructureFault)
    assert isinstance(world.outcome(1), Finished)


@pytest.mark.parametrize("stage", WORK)
def test_a_deadline_ends_its_job_in_its_stage(stage: str) -> None:
    world = World(StageLimits(**{f"{stage}_s": 3.0}))
    run(world.process([Plan(0, **{stage: 5.0}), Plan(1, **{stage: 2.5})]))
    failure = world.outcome(0)
    assert isinstance(failure, StageFailure)
    assert (failure.stage, failure.kind, failure.error) == (stage, "deadline", "it took longer than 3 s")
    assert failure.ms[failure.stage] == pytest.approx(3000)
    assert isinstance(world.outcome(1), Finished)


def test_a_deadline_counts_no_wait() -> None:
    world = World(StageLimits(init=1, ready=2, run=1, post=1, init_s=3, run_s=3, post_s=3))
    run(world.process([Plan(number, run=2.5, post=2.9) for number in range(5)]))
    assert all(isinstance(outcome, Finished) for _, outcome in world.ended)
    assert max(outcome.ms["ready"] for _, outcome in world.ended) > 3000


def test_what_run_kept_enters_post_once_when_its_deadline_passes() -> None:
    world = World(StageLimits(run_s=3))
    run(world.process([Plan(0, run=9, keeps=True)]))
    outcome = world.outcome()
    assert isinstance(outcome, Finished)
    assert (outcome.result, outcome.cut) == ("part", "deadline")


@pytest.mark.parametrize(
    ("at", "stage", "entered"),
    [(0.5, "init", 1), (2.0, "ready", 1), (6.0, "run", 2), (11.5, "post_wait", 2), (14.0, "post", 3)],
)
def test_a_job_cancelled_in_any_stage_ends_there(at: float, stage: str, entered: int) -> None:
    # Job 1 is prepared at 1, waits for job 0 until 5, runs until 11, waits for POST until 13.
    world = World(StageLimits(init=2, ready=1, run=1, post=1))
    run(world.process_and_cancel([Plan(0, run=4, post=8), Plan(1, run=6, post=2)], at, 1))
    failure = world.outcome(1)
    assert isinstance(failure, StageFailure)
    assert (failure.stage, failure.kind) == (stage, "cancelled")
    assert isinstance(world.outcome(0), Finished)
    assert [work for work in WORK if world.begun[work, 1]] == list(WORK[:entered])


def test_what_run_kept_enters_post_once_when_it_is_cancelled() -> None:
    world = World()
    run(world.process_and_cancel([Plan(0, run=9, keeps=True)], 4.0, 0))
    outcome = world.outcome()
    assert isinstance(outcome, Finished)
    assert (outcome.result, outcome.cut) == ("part", "cancelled")


def test_a_job_cancelled_in_run_can_be_cancelled_again_in_post() -> None:
    world = World()

    async def twice() -> None:
        for at in (4.0, 4.5):
            asyncio.get_running_loop().call_later(at, world.pipeline.cancel, lambda plan: True)
        await world.process([Plan(0, run=9, keeps=True)])

    run(twice())
    failure = world.outcome()
    assert isinstance(failure, StageFailure)
    assert (failure.stage, failure.kind) == ("post", "cancelled")


@pytest.mark.parametrize("ticks", range(6))
@pytest.mark.parametrize("stage", WORK)
@pytest.mark.parametrize("whole", [False, True])
def test_a_cancellation_just_after_a_stage_is_not_lost(stage: str, ticks: int, whole: bool) -> None:
    """Turns of the event loop lie between the end of a stage and the next step of its job."""
    world, ended = World(), asyncio.Event()

    def ending(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def ended_after(*arguments: Any) -> Any:
            try:
                return await function(*arguments)
            finally:
                ended.set()

        return ended_after

    stages = {name: ending(getattr(world, name)) if name == stage else getattr(world, name) for name in WORK}
    pipeline = Pipeline(ONE, stages["init"], stages["run"], stages["post"], world.on_result)

    async def cancelled() -> None:
        work = asyncio.create_task(pipeline.process([Plan(0)]))
        await ended.wait()
        for _ in range(ticks):
            await asyncio.sleep(0)
        chosen = work.cancel() if whole else pipeline.cancel(lambda plan: True)
        await asyncio.wait({work})
        assert work.cancelled() == (whole and bool(chosen))
        if stage == "post":
            assert isinstance(world.outcome(), Finished)
        elif whole:
            assert world.ended == []
        elif chosen:
            assert isinstance(world.outcome(), StageFailure) or (stage, world.begun["post", 0]) == ("run", 1)
        if stage == "init" or (stage == "run" and whole):
            assert not world.begun["post", 0]

    run(cancelled())


def test_cancel_says_how_many_jobs_it_chose() -> None:
    world = World(StageLimits(init=4, ready=4, run=4, post=4), hand_over_s=5)

    async def counted() -> list[int]:
        work = asyncio.create_task(world.process([Plan(number) for number in range(4)]))
        await asyncio.sleep(0.5)
        found = [world.pipeline.cancel(lambda plan: plan.number > 1)]
        await asyncio.sleep(4)
        found.append(world.pipeline.cancel(lambda plan: True))
        await work
        return found

    assert run(counted()) == [2, 0]
    assert [isinstance(world.outcome(number), Finished) for number in range(4)] == [True, True, False, False]


def test_a_slow_consumer_slows_the_source_down() -> None:
    world = World(StageLimits(init=1, ready=2, run=3, post=1), hand_over_s=100)

    async def watched() -> None:
        work = asyncio.create_task(world.process([Plan(number) for number in range(40)]))
        await asyncio.sleep(99)
        # In each stage its bound, one waiting for POST, and one more that INIT has begun.
        assert world.taken == 1 + 2 + 3 + 1 + 1
        work.cancel()
        await asyncio.wait({work})

    run(watched())


def test_a_source_is_read_no_further_than_there_is_room() -> None:
    world = World(StageLimits(init=2, ready=1, run=1, post=1))

    async def watched() -> list[int]:
        work = asyncio.create_task(world.process([Plan(number, run=10) for number in range(9)]))
        await asyncio.sleep(0.5)
        first = world.taken
        await asyncio.sleep(8)
        second = world.taken
        await work
        return [first, second]

    assert run(watched()) == [2, 4]


def test_a_source_may_be_asynchronous_and_empty() -> None:
    async def source(count: int) -> AsyncIterator[Plan]:
        for number in range(count):
            await asyncio.sleep(3)
            yield Plan(number)

    world = World()
    run(world.pipeline.process(source(2)))
    assert len(world.ended) == 2
    assert run(World().pipeline.process(source(0))) == 0
    assert run(World().process([])) == 0


def test_an_error_of_the_source_is_raised_when_what_it_gave_is_through() -> None:
    def source() -> Iterator[Plan]:
        yield Plan(0)
        raise ValueError("no more")

    world = World(StageLimits())
    with pytest.raises(ValueError, match="no more"):
        run(world.pipeline.process(source()))
    assert isinstance(world.outcome(0), Finished)


def test_an_error_of_the_consumer_ends_the_pipeline() -> None:
    def full(plan: Plan, outcome: object) -> None:
        raise OSError("disk full")

    async def endless() -> AsyncIterator[Plan]:
        yield Plan()
        await asyncio.sleep(1e9)

    world = World()
    pipeline = Pipeline(ONE, world.init, world.run, world.post, full)

    async def process() -> float:
        with pytest.raises(OSError, match="disk full"):
            await pipeline.process(endless())
        return asyncio.get_running_loop().time()

    assert run(process()) == pytest.approx(3)


def test_a_stage_that_cancels_itself_has_failed() -> None:
    async def odd(plan: Plan) -> Plan:
        raise asyncio.CancelledError

    world = World()
    pipeline = Pipeline(ONE, odd, world.run, world.post, world.on_result)
    run(pipeline.process([Plan()]))
    failure = world.outcome()
    assert isinstance(failure, StageFailure)
    assert (failure.stage, failure.kind) == ("init", "fault")


def test_times_are_told_for_work_and_waits_apart() -> None:
    world = World(StageLimits(init=2, ready=2, run=1, post=1))
    use = run(world.process([Plan(0, init=1, run=2, post=4), Plan(1, init=1, run=3, post=1)]))
    first, second = world.outcome(0), world.outcome(1)
    assert first.ms == pytest.approx({"init": 1000, "ready": 0, "run": 2000, "post_wait": 0, "post": 4000})
    assert second.ms == pytest.approx({"init": 1000, "ready": 2000, "run": 3000, "post_wait": 1000, "post": 1000})
    assert use == pytest.approx(5 / 8)


def test_the_wait_for_run_counts_from_the_end_of_init() -> None:
    world = World(StageLimits(init=3, ready=1, run=1, post=1))
    run(world.process([Plan(number, init=1, run=2, post=0) for number in range(3)]))
    assert [world.outcome(number).ms["ready"] for number in range(3)] == pytest.approx([0, 2000, 4000])


def test_a_pipeline_takes_one_source() -> None:
    async def twice() -> None:
        world = World()
        await world.process([])
        with pytest.raises(RuntimeError, match="one source"):
            await world.process([])

    run(twice())


@pytest.mark.parametrize("stage", ["init", "ready", "run", "post"])
def test_every_stage_has_room(stage: str) -> None:
    with pytest.raises(ConfigError, match="room"):
        msgspec.structs.replace(ONE, **{stage: 0})


@pytest.mark.parametrize("seed", range(5))
def test_stages_use_the_run_slots_better_than_a_pool_that_knows_none(seed: int) -> None:
    scoring = run(stages.compare("slow scoring", seed, 1))
    assert scoring["use"] >= 0.8
    assert scoring["ratio"] >= 1.35
    assert run(stages.compare("slow init and scoring", seed, 1))["ratio"] >= 1.35
    assert run(stages.compare("cheap", seed, 1))["ratio"] >= 1.0


def test_the_benchmark_of_stages_prints_use_and_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    report = stages.main(["--seeds", "1", "--scale", "2000", "--json"])
    assert json.loads(capsys.readouterr().out) == report
    assert report["profiles"].keys() == stages.PROFILES.keys()
    assert all(0 < row["use"] <= 1 for row in report["profiles"].values())
    stages.main(["--seeds", "1", "--scale", "2000"])
    assert "slow scoring" in capsys.readouterr().out


def test_it_tells_how_many_jobs_are_in_each_stage() -> None:
    world = World(StageLimits(init=2, ready=1, run=2, post=1))
    names = ("init", "ready", "run", "post_wait", "post")

    async def watched() -> list[tuple[int, ...]]:
        going = asyncio.create_task(world.process([Plan(number, run=10.0, post=20.0) for number in range(8)]))
        seen = []
        for _ in range(3):
            await asyncio.sleep(5.5)
            seen.append(tuple(world.pipeline.depths[name] for name in names))
        await going
        return [*seen, tuple(world.pipeline.depths.values())]

    # Two run; then one of them posts, the other waits for it, and two more run.
    assert run(watched()) == [(0, 3, 2, 0, 0), (0, 3, 2, 0, 0), (0, 3, 2, 1, 1), (0, 0, 0, 0, 0)]
