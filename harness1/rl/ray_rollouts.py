"""Play the episodes of a training run on a Ray cluster: each worker is an actor with its own retrievers, environments
and replica of the policy. All ordered state stays in the trainer's process: the source of jobs, the buffer, and the
published weights. If a worker dies, nothing is lost: its jobs are given to others, and a new worker starts as soon as
the cluster has room and gets the present weights before it plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness1.config import Fleet
from harness1.episodes.jobs import EpisodeJob, Jobs, OnEpisode, return_unchanged, run_jobs
from harness1.errors import InfrastructureFault, MissingExtra
from harness1.models.adapters import on_cpu
from harness1.records import Episode, Hashes
from harness1.rl.rollouts import Rollouts

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


CPUS = 1  # CPUs that Ray reserves for each worker
ATTEMPTS = 3  # workers that may be lost playing an episode before it counts as broken
PATIENCE_S = 300.0  # time without any worker before giving up


class RolloutActor:
    """`Rollouts` in the process of a worker, which `make` opens there. A plain class: only its caller needs Ray."""

    def __init__(self, make: Callable[[], Rollouts]) -> None:
        self._make = make

    async def open(self) -> None:
        """Open the rollouts. This is not done in the constructor, so that an error is the answer to a call."""
        self._rollouts = self._make()

    async def publish(self, state: Weights, version: int) -> None:
        await self._rollouts.publish(state, version)

    async def play(self, job: EpisodeJob) -> Episode:
        """Play one job; several are played at a time."""
        episodes: list[Episode] = []
        await self._rollouts.run([job], episodes.append)
        return episodes[0]

    async def live(self) -> None:
        """Never return: the call fails when the worker dies."""
        await asyncio.Event().wait()


@dataclass(eq=False)
class _Worker:
    actor: Any
    playing: int = 0
    weights: tuple[Any, int] | None = None  # those that it loaded; None if it still has its first ones
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class RayRollouts:
    """`Rollouts` over a cluster, within `async with`; they belong to one event loop. `make` opens those of a worker,
    which plays `places` episodes at a time, in its process: it is pickled, the package must be installed on every node,
    and the index and the policy must have the same hashes everywhere. Raise MissingExtra if ray is not installed."""

    def __init__(self, make: Callable[[], Rollouts], fleet: Fleet, places: int) -> None:
        try:
            import ray
            from ray import exceptions
        except ImportError as error:
            raise MissingExtra("ray", "ray") from error
        self._ray, self._make, self._fleet, self._places = ray, make, fleet, places
        self._task_error = exceptions.RayTaskError
        self._losses = (
            *(exceptions.RayActorError, exceptions.NodeDiedError, exceptions.WorkerCrashedError),
            *(exceptions.ObjectLostError, exceptions.OutOfMemoryError),
        )
        self._workers: list[_Worker] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._weights: tuple[Any, int] | None = None
        self._is_mine = False
        self.lost = 0  # workers that died so far

    async def __aenter__(self) -> RayRollouts:
        if not self._ray.is_initialized():
            self._ray.init(address=self._fleet.address or "local", log_to_driver=False)
            self._is_mine = True
        self._keepers = [asyncio.create_task(self._keep_one()) for _ in range(self._fleet.workers)]
        for keeper in self._keepers:
            keeper.add_done_callback(lambda _: self._changed.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._is_mine:
            self._ray.shutdown()

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        """Do as `Rollouts.run`. An episode is handed over once, however many workers died while playing it. Raise
        InfrastructureFault if no worker was available for `PATIENCE_S` seconds."""
        places = self._fleet.workers * self._places
        await run_jobs(jobs, self._play, return_unchanged, on_episode, places)

    async def publish(self, state: Weights, version: int) -> None:
        """Do as `Rollouts.publish`: the weights are put into the cluster's store once, and all workers load them."""
        self._weights = await asyncio.to_thread(self._ray.put, on_cpu(state)), version

        async def reach(worker: _Worker) -> None:
            try:
                await self._update(worker)
            except self._losses:
                self._dismiss(worker)

        await asyncio.gather(*map(reach, self._workers))

    async def _keep_one(self) -> None:
        """Start one worker after another, forever."""
        needs = {"num_cpus": CPUS, "num_gpus": self._fleet.gpus}
        actor_class: Any = self._ray.remote(RolloutActor)
        actor_class = actor_class.options(max_concurrency=self._places + 3, scheduling_strategy="SPREAD", **needs)
        stillborn = 0
        while True:
            worker = _Worker(actor_class.remote(self._make))
            try:
                await self._answer(worker.actor.open.remote())
                self._workers.append(worker)
                await self._update(worker)
                self._changed.set()
                stillborn = 0
                await self._answer(worker.actor.live.remote())
            except self._losses as loss:
                self.lost += 1
                stillborn += 1
                if stillborn > ATTEMPTS:
                    raise InfrastructureFault(
                        f"{stillborn} workers in a row died as they began: {_last_line(loss)}"
                    ) from loss
            finally:
                self._dismiss(worker)

    async def _update(self, worker: _Worker) -> None:
        """Give a worker the present weights, if it has others. Updates run one at a time, so that the last stays."""
        async with worker.loading:
            weights = self._weights
            if weights is not None and worker.weights is not weights:
                await self._answer(worker.actor.publish.remote(*weights))
                worker.weights = weights
                self._changed.set()

    async def _play(self, job: EpisodeJob) -> Episode:
        """Have a job played, by another worker if one dies while playing it."""
        error = ""
        for _ in range(ATTEMPTS):
            worker = await self._free_worker()
            worker.playing += 1
            try:
                return await self._episode(worker.actor.play.remote(job))
            except self._losses as loss:
                self._dismiss(worker)
                error = _last_line(loss)
            finally:
                worker.playing -= 1
                self._changed.set()
        nobody_knows = Hashes(env="", policy="", index="")
        return job.broken(nobody_knows, f"{ATTEMPTS} workers were lost over it; the last: {error}")

    async def _episode(self, call: Any) -> Episode:
        """Await an episode. If cancelled, wait until the worker has ended it and its place is free."""
        answer: asyncio.Task[Episode] = asyncio.create_task(self._answer(call))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._ray.cancel(call)
            await asyncio.gather(answer, return_exceptions=True)
            raise

    async def _free_worker(self) -> _Worker:
        """Wait for a free place, and return the least busy worker with the present weights."""
        clock, deadline = asyncio.get_running_loop().time, None
        while True:
            for keeper in self._keepers:
                if keeper.done():
                    keeper.result()
            present = [each for each in self._workers if each.weights is self._weights]
            worker = min(present, key=lambda each: each.playing, default=None)
            if worker and worker.playing < self._places:
                return worker
            deadline = None if self._workers else deadline or clock() + PATIENCE_S
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                wanted = f"{CPUS:g} CPU and {self._fleet.gpus:g} GPUs"
                raise InfrastructureFault(f"no worker, each of {wanted}, for {PATIENCE_S:g} s") from None

    def _dismiss(self, worker: _Worker) -> None:
        """Give a worker no more jobs, and kill it: nobody awaits its results any more."""
        if worker in self._workers:
            self._workers.remove(worker)
        self._ray.kill(worker.actor)
        self._changed.set()

    async def _answer(self, call: Any) -> Any:
        """Return the answer of a worker, or raise its exception."""
        try:
            return await call
        except self._task_error as error:
            raise error.cause from error


def _last_line(error: Exception) -> str:
    """Return the line in which Ray gives the reason."""
    return str(error).strip().rpartition("\n")[2].strip()
