"""Play the episodes of a training run, in this process or on a Ray cluster, where each worker is an actor with its own
retrievers, environments and replica of the policy. All ordered state stays in the trainer's process. If a worker dies,
its jobs are given to others, and a new one starts as soon as there is room and gets the present weights before it
plays."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from harness1.config import Config, Fleet
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, Jobs, OnEpisode, play_in_loop, return_unchanged, run_jobs
from harness1.errors import ConfigError, InfrastructureFault, UsageError, optional
from harness1.model_folder import base_folder
from harness1.models.adapters import Adapters, on_cpu, write_adapters
from harness1.models.backend import Backend, Sleeper, WeightLoader
from harness1.models.open import format_at, open_backend
from harness1.models.spec import ModelSpec
from harness1.models.transformers_backend import TransformersBackend
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode, Hashes
from harness1.training.saving import copy_beside_weights

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


class Rollouts(Protocol):
    """Plays episodes with the weights published last. Several calls of `run` may be in progress at once."""

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        """Play all jobs. `on_episode` is called in the event loop, with episodes that are scored or that the
        infrastructure broke (`Status.INFRA_ERROR`); any other error is raised."""
        ...

    async def publish(self, state: Weights, version: int, /) -> None:
        """Switch to new adapters, or a whole state dictionary: calls in flight end with the old weights; later calls
        are sampled with the new ones and recorded under `version`. The weights must not change until this returns.
        Raise InfrastructureFault if they could not be delivered."""
        ...


Publish = Callable[["Weights", int], Coroutine[Any, Any, None]]  # gives new weights to a policy, as `Rollouts.publish`
KEPT = 2  # versions kept on disk, the last ones: an engine may still be reading the one before


class LocalRollouts:
    """`Rollouts` in stages, of one policy, in the setups that `EpisodeJob.setup` counts. `base` is the folder of the
    model, and `versions` that of its versions, for a backend that loads weights by path."""

    def __init__(self, setups: Sequence[EpisodeSetup], policy: LanguageModelPolicy, base: Path, versions: Path) -> None:
        self.run = partial(play_in_loop, setups, policy)
        self.publish = partial(publish_to, policy.model, base=base, versions=versions)


async def publish_to(backend: Backend, state: Weights, version: int, base: Path, versions: Path) -> None:
    """Give adapters or whole weights to a backend: in memory if the model is in this process, otherwise by path."""
    if isinstance(backend, TransformersBackend):
        await backend.load_state(state, version)
    elif isinstance(backend, WeightLoader):
        await backend.load_weights(write_version(versions, base, state, version), version)
    else:
        raise UsageError(f"{type(backend).__name__} takes no weights: whoever trains gives them to it")


def write_version(root: Path, base: Path, state: Weights, version: int) -> Path:
    """Write a version of a model beside the previous one, remove all others, and return its folder. Later versions are
    those of a training that was cut short: it goes on from an earlier state. The other files of `base` are copied
    beside whole weights. Raise InfrastructureFault if there is no room, or the folder cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = root / f"version-{version}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(state, Adapters):
            write_adapters(folder, state, base_folder(base))
        else:
            copy_beside_weights(base, folder)
            first: dict[int, str] = {}  # of names that share one storage, as a tied head does, readers need only that
            for name, value in state.items():
                first.setdefault(value.data_ptr(), name)
            kept = {name: state[name].detach().cpu().contiguous() for name in first.values()}
            save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise InfrastructureFault(f"version {version} of the weights cannot be written to {root}: {error}") from error
    for other in root.glob("version-*"):
        if not version - KEPT < int(other.name.partition("-")[2]) <= version:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def open_rollouts(setups: Sequence[EpisodeSetup], spec: str, base: Path, versions: Path) -> LocalRollouts:
    """Open rollouts with a policy of their own (`open_policy_to_train`), in a worker on any machine. The worker writes
    versions into its own folder, because workers do not wait for each other."""
    own = versions / f"{socket.gethostname()}-{os.getpid()}"
    return LocalRollouts(setups, open_policy_to_train(spec, setups[0].config), base, own)


def open_policy_to_train(spec: str, config: Config, sampler: Backend | None = None) -> LanguageModelPolicy:
    """Open the policy to be trained. It must be sampled from its unchanged distribution, which is the one trained. A
    `sampler` samples in place of the model, of which only the tokenizer is needed then. Raise UsageError if `spec`
    names no model that gives token ids; ConfigError if the sampling settings change the distribution."""
    asked, settings = ModelSpec.read(spec), config.policy
    if asked.kind == "openai":
        raise UsageError(f"{spec} gives no token ids: train hf:PATH, vllm:PATH, vllm:MODEL@URL or sglang:MODEL@URL")
    if (settings.temperature, settings.constrained) != (1.0, False):
        needed = "set policy.temperature=1 and policy.constrained=false"
        raise ConfigError(f"reinforcement learning samples from the policy itself: {needed}")
    if sampler is not None:
        model, chat = sampler, format_at(asked.model, config)
    else:
        model, chat = open_backend(asked, config, config.train.lora.rank)
    return LanguageModelPolicy(model, chat, config.env.generation_reserve, settings, spec)


Undisturbed = Callable[[], AbstractAsyncContextManager[None]]  # in it the trainer has the devices for itself


def reserve_devices(sampler: Backend, config: Config, device: str, processes: int = 1) -> Undisturbed:
    """Return what a training run of some processes on a device steps in: with `machine.model.sleep` the sampler sleeps
    there; raise ConfigError if it cannot sleep, or the trainer does not own all devices of it."""
    if not config.machine.model.sleep:
        return nullcontext
    if not isinstance(sampler, Sleeper):
        raise ConfigError("machine.model.sleep is for vllm:PATH and vllm:MODEL@URL: no other sampler can sleep")
    if config.machine.fleet.workers:
        raise ConfigError("machine.model.sleep is for one sampler: the workers of a fleet have devices of their own")
    if processes > 1:
        raise ConfigError("machine.model.sleep is for training in one process: give several GPUs of their own")

    @asynccontextmanager
    async def let_sleep() -> AsyncIterator[None]:
        async with sampler.asleep():
            try:
                yield
            finally:
                if device.startswith("cuda"):
                    import torch

                    torch.cuda.empty_cache()  # torch keeps what it has freed, and the sampler needs it to wake

    return let_sleep


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
        with optional("ray", "ray"):
            import ray
            from ray import exceptions
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
        """Do as `Rollouts.run`; raise InfrastructureFault if no worker was available for `PATIENCE_S` seconds."""
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
                    why = f"{stillborn} workers in a row died as they began: {_last_line(loss)}"
                    raise InfrastructureFault(why) from loss
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
        error = ""
        for _ in range(ATTEMPTS):
            worker = await self._free_worker()
            worker.playing += 1
            try:
                call = worker.actor.play.remote(job)
                answer: asyncio.Task[Episode] = asyncio.create_task(self._answer(call))
                try:
                    return await asyncio.shield(answer)
                except asyncio.CancelledError:  # wait until the worker has ended it and its place is free
                    self._ray.cancel(call)
                    await asyncio.gather(answer, return_exceptions=True)
                    raise
            except self._losses as loss:
                self._dismiss(worker)
                error = _last_line(loss)
            finally:
                worker.playing -= 1
                self._changed.set()
        nobody_knows = Hashes(env="", policy="", index="")
        return job.broken(nobody_knows, f"{ATTEMPTS} workers were lost over it; the last: {error}")

    async def _free_worker(self) -> _Worker:
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
        try:
            return await call
        except self._task_error as error:
            raise error.cause from error


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2].strip()
