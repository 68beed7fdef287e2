"""Many episodes: the same results however they are spread, bounded, resumable."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.env.render import Context
from harness1.episodes import jobs as runner
from harness1.episodes.jobs import (
    Depths,
    EpisodeJob,
    EpisodeSetup,
    _hand_over,
    play_in_loop,
    return_unchanged,
    run_episodes,
    run_jobs,
)
from harness1.errors import InfrastructureFault, UsageError
from harness1.policy.policy import Decision
from harness1.records import Episode, Status, Task, encode_episode
from harness1.retrieval.build import build_index
from tests.support import Script
from tests.virtual_time import run

SOURCE = open_source("world:100")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runner") / "index"
    build_index(SOURCE.documents(), folder, Config().index)
    return str(folder)


def jobs(count: int) -> list[EpisodeJob]:
    tasks = SOURCE.tasks("train")
    return [EpisodeJob(tasks[number % len(tasks)], number // len(tasks)) for number in range(count)]


def episodes(index: str, workers: int, count: int, policy: str = "scripted") -> list[Episode]:
    found: list[Episode] = []
    config = load_config(None, [f"machine.workers={workers}"])
    run_episodes(EpisodeSetup(config, index, policy), jobs(count), found.append)
    return sorted(found, key=lambda episode: episode.key)


def timeless(found: list[Episode]) -> list[bytes]:
    return [msgspec.json.encode(msgspec.structs.replace(episode, stage_ms={})) for episode in found]


def test_workers_give_the_same_episodes_as_one_process_share_its_cores_and_tell_which_chunks_wait(
    index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen, told, threads = list[Episode](), list[dict[str, int]](), list[Depths](), list[int]()
    original = runner._run_in_processes

    def begin(setup: EpisodeSetup, *rest: Any) -> None:
        threads.append(setup.config.machine.threads)
        original(setup, *rest)

    def hear(episode: Episode) -> None:
        found.append(episode)
        seen.append(dict(told[0]()))

    monkeypatch.setattr(runner, "_run_in_processes", begin)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    config = load_config(None, ["machine.workers=2", "machine.concurrency=2"])
    run_episodes(EpisodeSetup(config, index, "scripted"), jobs(16), hear, told.append)
    assert timeless(sorted(found, key=lambda episode: episode.key)) == timeless(episodes(index, 1, 16))
    assert (len(told), threads) == (1, [3])
    assert seen[0]["chunks waiting"] == 4  # of eight; two for each worker are in flight
    assert dict(told[0]()) == {"chunks waiting": 0, "in flight": 0}
    given = EpisodeSetup(load_config(None, ["machine.threads=5"]), index, "scripted", reasoned=True, student="folder")
    assert given.share(2) == given


def test_no_more_episodes_run_at_once_than_the_bound(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0
    original = runner.rollout

    async def rollout(*arguments: Any, **options: Any) -> Episode:
        nonlocal running, most
        running += 1
        most = max(most, running)
        episode = await original(*arguments, **options)
        running -= 1
        return episode

    monkeypatch.setattr(runner, "rollout", rollout)
    config = load_config(None, ["machine.workers=1", "machine.concurrency=2"])
    run_episodes(EpisodeSetup(config, index, "scripted"), jobs(8), lambda _: None)
    assert most == 2


def test_workers_without_a_chunk_are_not_taken_for_dead(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four jobs over three workers are two chunks of two."""
    monkeypatch.setattr(runner, "FEW", 1)
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    assert len(episodes(index, 3, 4)) == 4


def test_what_is_done_is_handed_over_once_before_a_dead_workers_chunk_and_after_an_interrupt(index: str) -> None:
    played = episodes(index, 1, 3)
    chunks = [Future[list[bytes]]() for _ in range(3)]
    chunks[0].set_exception(BrokenProcessPool())
    chunks[1].set_result([encode_episode(played[0])])
    chunks[2].set_result([encode_episode(each) for each in played[1:]])
    running, heard = set(chunks), list[Episode]()

    def interrupted(episode: Episode) -> None:
        if len(heard) == 2:
            raise KeyboardInterrupt
        heard.append(episode)

    with pytest.raises(KeyboardInterrupt):
        _hand_over(set(chunks), running, interrupted)
    with pytest.raises(BrokenProcessPool):
        _hand_over(set(running), running, heard.append)
    assert (sorted(each.key for each in heard), running) == ([each.key for each in played], {chunks[0]})


def test_a_policy_of_this_process_plays_in_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    monkeypatch.setattr(runner, "run_chunk", lambda _, chunk: ran.append(len(chunk)) or [])
    config = load_config(None, ["machine.workers=2", "machine.concurrency=5"])
    setup = EpisodeSetup(config, "index", "scripted", own=Script())
    run_episodes(setup, jobs(12), lambda _: None)
    assert ran == [5, 5, 2]


def test_a_killed_worker_is_an_infrastructure_fault_and_not_a_hang(index: str) -> None:
    found: list[Episode] = []

    def kill_a_worker() -> None:
        while not found:
            time.sleep(0.01)
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        workers = [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]
        os.kill(workers[-1], signal.SIGKILL)

    threading.Thread(target=kill_a_worker, daemon=True).start()
    setup = EpisodeSetup(load_config(None, ["machine.workers=2"]), index, "scripted")
    with pytest.raises(InfrastructureFault, match="worker process died"):
        run_episodes(setup, jobs(200), found.append)
    assert found


class Failing(Script):
    """Ends every episode at once; those of some seeds raise instead."""

    def open(self, task: Task, seed: int) -> Any:
        async def act(_: Context) -> Decision:
            raise FAULTS[seed]

        return SimpleNamespace(act=act) if seed in FAULTS else super().open(task, seed)


FAULTS: dict[int, Exception] = {3: InfrastructureFault("the model is gone"), 99: UsageError("a wrong key")}


def staged(index: str, seeds: Sequence[int]) -> list[Episode]:
    found: list[Episode] = []
    work = [msgspec.structs.replace(job, seed=seed) for job, seed in zip(jobs(len(seeds)), seeds, strict=True)]
    setup = EpisodeSetup(Config(), index, "hf:script", own=Failing())
    asyncio.run(play_in_loop([setup], setup.policy_for(work), work, found.append))
    return found


def test_a_fault_of_a_model_breaks_one_episode_and_what_the_user_must_mend_ends_all(index: str) -> None:
    found = staged(index, range(8))
    assert len(found) == 8
    broken = [episode for episode in found if episode.status is Status.INFRA_ERROR]
    assert [(episode.seed, episode.error) for episode in broken] == [(3, "the model is gone")]
    assert all(episode.reward is not None for episode in found if episode not in broken)
    with pytest.raises(UsageError, match="a wrong key"):
        staged(index, [0, 1, 99, 2])


def test_a_fault_in_scoring_is_that_episodes_own(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.score

    def score(episode: Episode, *rest: Any) -> Episode:
        if episode.seed == 1:
            raise InfrastructureFault("the judge is gone")
        return real(episode, *rest)

    monkeypatch.setattr(runner, "score", score)
    found = {episode.seed: episode for episode in staged(index, range(4))}
    assert len(found) == 4
    assert (found[1].status, found[1].error) == (Status.INFRA_ERROR, "scoring: the judge is gone")
    assert found[1].turns, "what it had done is kept"
    assert found[1].key[2:] == found[0].key[2:]


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
    assert (world.ended, world.within.total()) == ([], 0)


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
    assert (world.within.total(), closed) == (0, [True])
