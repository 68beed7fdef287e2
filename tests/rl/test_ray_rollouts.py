"""Rollouts on a real Ray cluster of local processes: nothing is lost or done twice, whatever dies."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from ray.cluster_utils import Cluster

from harness1.config import Fleet
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup
from harness1.errors import ConfigError, InfrastructureFault
from harness1.records import Episode, Hashes, Status, Task
from harness1.rl.rollouts import RayRollouts
from harness1.rl.train import Training, train_policy
from harness1.training.log import read_log
from tests.rl.toy import ToyRollouts, open_toy, toy_config, toy_tasks
from tests.support import ended_episode
from tests.tiny_models import save_byte_tokenizer, save_tiny_model
from tests.vocabularies import chat_format

pytestmark = pytest.mark.ray
STORE = 80 * 2**20
PLACES = 3
FLEET = Fleet(workers=2)


@dataclass(frozen=True)
class Weight:
    """As much of a tensor as is used on the way."""

    value: int

    def detach(self) -> Weight:
        return self

    def cpu(self) -> Weight:
        return self


class Fake:
    """Rollouts whose episodes tell where they were played, and that do what the query says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.version, self.playing = folder, 0, 0

    async def run(self, jobs: Iterable[EpisodeJob], on_episode: Callable[[Episode], None]) -> None:
        for job in jobs:
            begun = self.version
            self.playing += 1
            assert self.playing <= PLACES, "more than a worker has places for"
            try:
                await asyncio.sleep(0.05)
            finally:
                self.playing -= 1
            kind, _, name = job.task.query.partition(" ")
            if kind == "poison" or (kind == "fatal" and first(self.folder / name)):
                os._exit(1)
            if kind == "wrong":
                raise ConfigError("nobody can play this")
            where = Hashes(env="", policy="", index=ray.get_runtime_context().get_node_id())
            episode = msgspec.structs.replace(ended_episode(), episode_id=f"{os.getpid()}", task=job.task, hashes=where)
            known = {"sample_idx": job.sample_idx, "policy_versions": (begun, self.version)}
            on_episode(msgspec.structs.replace(episode, **known))

    async def publish(self, state: dict[str, Weight], version: int) -> None:
        await asyncio.sleep(0.05)
        assert state["w"].value == version
        self.version = version


def first(marker: Path) -> bool:
    """Whether nobody was here before."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without room for workers, and one node with room for two. Workers import this file."""
    with pytest.MonkeyPatch.context() as patch:
        here = Path(__file__)
        patch.setenv("PYTHONPATH", f"{here.parents[2]}{os.pathsep}{here.parent}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
        made.add_node(num_cpus=2, object_store_memory=STORE)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


def jobs(count: int, *queries: str) -> list[EpisodeJob]:
    asked = [*queries, *["plain"] * (count - len(queries))]
    return [EpisodeJob(Task(task_id=str(number), query=query), sample_idx=number) for number, query in enumerate(asked)]


def play(
    make: Callable[[], Any], asked: list[EpisodeJob], fleet: Fleet = FLEET, places: int = PLACES
) -> tuple[list[Episode], int]:
    """The episodes, in order, and how many workers were lost."""
    found: list[Episode] = []

    async def main() -> int:
        async with RayRollouts(make, fleet, places) as rollouts:
            await rollouts.run(asked, found.append)
            return rollouts.lost

    lost = asyncio.run(main())
    assert sorted(episode.sample_idx for episode in found) == list(range(len(asked)))
    return sorted(found, key=lambda episode: episode.sample_idx), lost


def test_a_worker_that_exits_is_replaced_and_its_jobs_go_to_others(cluster: Cluster, tmp_path: Path) -> None:
    episodes, lost = play(partial(Fake, tmp_path), jobs(40, "plain", "fatal a", "plain", "plain", "fatal b"))
    assert {episode.status for episode in episodes} == {Status.COMPLETED}
    assert 1 <= lost <= 2
    assert len({episode.episode_id for episode in episodes}) >= 2


def test_a_job_that_kills_its_workers_is_broken_by_the_infrastructure(cluster: Cluster, tmp_path: Path) -> None:
    episodes, lost = play(partial(Fake, tmp_path), jobs(12, "poison"), places=1)
    assert [episode.status for episode in episodes] == [Status.INFRA_ERROR, *[Status.COMPLETED] * 11]
    assert "3 workers were lost" in (episodes[0].error or "")
    assert lost == 3


class Mortal(ToyRollouts):
    """Takes its process with it when it comes to one of the groups, once."""

    def __init__(self, base: Path, deaths: Path) -> None:
        super().__init__(open_toy(base))
        self.deaths = deaths

    async def play(self, job: EpisodeJob) -> Episode:
        if job.group_id == "9" and first(self.deaths / "died"):
            os._exit(1)
        return await super().play(job)


def test_a_policy_learns_over_a_cluster_that_loses_a_worker(cluster: Cluster, tmp_path: Path) -> None:
    base = save_tiny_model(save_byte_tokenizer(tmp_path / "base"), initializer_range=0.05)
    tasks, config = toy_tasks(12), toy_config(["rl.staleness=1", "rl.batches=14"])
    work = Training(tasks[:8], tasks[8:], [EpisodeSetup(config, "", "hf:toy")], base, tmp_path / "out", config)
    players = RayRollouts(partial(Mortal, base, tmp_path), FLEET, 8)
    train_policy(work, players, chat_format("compact", "chatml"), "toy", lambda *_: None)
    lines = read_log(tmp_path / "out")
    before, after = (line["held_out/reward"] for line in lines if "held_out/reward" in line)
    steps = [line for line in lines if "loss" in line]
    assert after - before > 0.2
    assert (tmp_path / "died").exists()
    assert (players.lost, steps[-1]["groups/trained"]) == (1, 56)
    assert max(line["staleness_max"] for line in steps) <= 1


def refuse(why: str) -> Fake:
    raise ConfigError(why)


@pytest.mark.usefixtures("cluster")
def test_what_cannot_be_played_or_begun_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.rl.rollouts.ATTEMPTS", 1)
    fake = partial(Fake, tmp_path)
    with pytest.raises(ConfigError, match="nobody can play this"):
        play(fake, jobs(12, "plain", "wrong"))
    with pytest.raises(ConfigError, match="no such model"):
        play(partial(refuse, "no such model"), jobs(1))
    monkeypatch.setattr("harness1.rl.rollouts.PATIENCE_S", 1.0)
    with pytest.raises(InfrastructureFault, match="no worker, each of 1 CPU and 64 GPUs"):
        play(fake, jobs(1), Fleet(workers=2, gpus=64))
    monkeypatch.undo()
    monkeypatch.setattr("harness1.rl.rollouts.ATTEMPTS", 1)
    with pytest.raises(InfrastructureFault, match=r"2 workers in a row died as they began: .*exit"):
        play(partial(os._exit, 1), jobs(1), Fleet(workers=1))


def test_no_job_is_played_with_weights_older_than_those_published_before(cluster: Cluster, tmp_path: Path) -> None:
    """Training goes on while jobs are played, a worker is lost now and then, and two runs share the workers."""
    asked: dict[int, int] = {}
    found: list[Episode] = []
    version = 0

    async def main() -> None:
        nonlocal version
        async with RayRollouts(partial(Fake, tmp_path), FLEET, PLACES) as rollouts:

            async def source(begin: int) -> AsyncIterator[EpisodeJob]:
                for job in jobs(begin + 60, *[f"fatal {n}" if n % 50 == 20 else "plain" for n in range(100)])[begin:]:
                    asked[job.sample_idx] = version
                    yield job

            runs = [asyncio.create_task(rollouts.run(source(begin), found.append)) for begin in (0, 100)]
            while not all(task.done() for task in runs):
                await rollouts.publish({"w": Weight(version + 1)}, version + 1)
                version += 1
                await asyncio.sleep(0.02)
            await asyncio.gather(*runs)
            assert rollouts.lost >= 1

    asyncio.run(main())
    assert Counter(episode.sample_idx for episode in found) == Counter(asked.keys())
    assert version > 5
    assert all(asked[each.sample_idx] <= each.policy_versions[0] <= each.policy_versions[1] for each in found)


def test_cancelling_a_run_leaves_the_workers_to_the_next(cluster: Cluster, tmp_path: Path) -> None:
    found: list[Episode] = []

    async def main() -> None:
        async with RayRollouts(partial(Fake, tmp_path), FLEET, PLACES) as rollouts:
            first_run = asyncio.create_task(rollouts.run(jobs(1000), found.append))
            while len(found) < 10 and not first_run.done():
                await asyncio.sleep(0.01)
            first_run.cancel()
            await asyncio.wait({first_run})
            found.clear()
            await rollouts.run(jobs(10), found.append)
            assert rollouts.lost == 0

    asyncio.run(main())
    assert sorted(each.sample_idx for each in found) == list(range(10))


def test_a_node_that_is_lost_is_survived(cluster: Cluster, tmp_path: Path) -> None:
    """Workers spread over two nodes; one is removed midway, and a third one joins."""
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE)
    cluster.wait_for_nodes()
    found: list[Episode] = []

    async def main() -> None:
        async with RayRollouts(partial(Fake, tmp_path), Fleet(workers=4), PLACES) as rollouts:
            await rollouts.publish({"w": Weight(1)}, 1)

            async def source() -> AsyncIterator[EpisodeJob]:
                for job in jobs(400):
                    if job.sample_idx == 150:
                        assert len({each.hashes.index for each in found}) == 2
                        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
                        cluster.add_node(num_cpus=2, object_store_memory=STORE)
                    yield job

            await rollouts.run(source(), found.append)
            assert rollouts.lost >= 2

    asyncio.run(main())
    assert Counter(each.sample_idx for each in found) == Counter(range(400))
    assert {each.status for each in found} == {Status.COMPLETED}
    assert {each.policy_versions for each in found} == {(1, 1)}
