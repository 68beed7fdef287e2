"""Play many episodes: a job for each, the setup in which they are played, and how they share a machine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from harness1.config import Config
from harness1.env.environment import SearchEnv, env_hash
from harness1.env.model_verifiers import open_verifier
from harness1.env.pieces import TokenCounter, counter_of
from harness1.episodes.rollout import rollout
from harness1.errors import InfrastructureFault, UsageError
from harness1.models.spec import is_model
from harness1.plain import digest
from harness1.plugins import is_of_session, short_name
from harness1.policy.policy import Policy
from harness1.policy.registry import needs_gold, open_policy
from harness1.policy.wrappers import ReasonedPolicy, in_student_format
from harness1.records import Episode, Hashes, Record, Status, StopReason, Task, decode_episode, encode_episode
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import Retriever
from harness1.reward import score

if TYPE_CHECKING:
    from concurrent.futures import Future

    from harness1.models.chat_format import ChatFormat

POLL_S = 2.0  # seconds without a result after which the workers are counted
FEW = 4  # episodes that are too few to justify starting another worker process

Depths = Callable[[], Mapping[str, int]]  # counts the jobs in each queue at the moment of the call, from any thread
OnDepths = Callable[[Depths], None]  # called once, as soon as there are queues
OnEpisode = Callable[[Episode], None]  # called once for each job, in no fixed order
Job = TypeVar("Job")
Played = TypeVar("Played")
Result = TypeVar("Result")


def ignore_depths(_: Depths) -> None:
    """Ignore the queues."""


class EpisodeJob(Record):
    """One episode to play; the task carries its gold, which only scoring and the oracles see."""

    task: Task
    sample_idx: int = 0
    seed: int = 0
    group_id: str | None = None
    setup: int = 0  # the position of its setup, if there are several

    async def play(self, env: SearchEnv, policy: Policy) -> Episode:
        """Play the episode; it is not scored."""
        return await rollout(env, policy, self.task, seed=self.seed, sample_idx=self.sample_idx, group_id=self.group_id)

    def broken(self, hashes: Hashes, error: str) -> Episode:
        """Make the record of the episode if a fault ended it outside its turns."""
        task = self.task.public()
        name = digest([task, self.sample_idx, self.seed, hashes])[:16]
        fault: dict[str, Any] = {"stop_reason": StopReason.FAULT, "status": Status.INFRA_ERROR, "error": error}
        fault |= {"sample_idx": self.sample_idx, "group_id": self.group_id, "seed": self.seed}
        return Episode(episode_id=name, task=task, hashes=hashes, **fault)


Jobs = Iterable[EpisodeJob] | AsyncIterable[EpisodeJob]  # read as there is room for them


@dataclass(frozen=True)
class EpisodeSetup:
    """The setting in which jobs are played: plain values, so that it can be sent to a worker process."""

    config: Config
    retriever: str
    policy: str
    reasoned: bool = False  # ask the policy for a reason with every call
    student: str = ""
    """The tokenizer folder of the student that learns from the episodes, which are recorded in its `policy.format`."""
    own: Policy | None = None
    """The policy itself, where it is an object of this process; `policy` is its name then."""

    def open_retriever(self) -> Retriever:
        """Return the retriever, opened once in each process."""
        return _retriever(self.retriever, self.config)

    def environment(self, retriever: Retriever, policy: Policy) -> SearchEnv:
        """Make an environment that counts tokens as the policy does."""
        env, machine = self.config.env, self.config.machine
        return SearchEnv(env, retriever, _verifier(env, machine), counter_of(policy), machine)

    def share(self, workers: int) -> EpisodeSetup:
        """Return this setup with the cores divided among worker processes, each of which may load a model."""
        machine = self.config.machine
        threads = machine.threads or max(1, (os.cpu_count() or 1) // workers)
        config = msgspec.structs.replace(self.config, machine=msgspec.structs.replace(machine, threads=threads))
        return replace(self, config=config)

    def policy_for(self, jobs: Sequence[EpisodeJob]) -> Policy:
        """Return the policy that plays the jobs. An oracle is given their gold, and is made anew."""
        if self.own is not None:
            policy = self.own
        elif needs_gold(self.policy):
            golds = {job.task.task_id: job.task.gold for job in jobs if job.task.gold is not None}
            policy = open_policy(self.policy, golds, self.config)
        else:
            policy = _policy(self.policy, None, self.config)
        if not (self.reasoned or self.student):
            return policy
        if self.reasoned:
            policy = ReasonedPolicy(policy)
        return in_student_format(policy, _student(self.student, self.config)) if self.student else policy


def describe_counter(counter: TokenCounter) -> tuple[dict[str, str], dict[str, str]]:
    """Return what the card of a run says of its counter: hashes, and the chat `format` if a model reads the tokens."""
    if not hasattr(counter, "tokenizer"):
        return {"counter": counter.hash}, {}
    chat = cast("ChatFormat", counter)
    return {"counter": chat.hash, "tokenizer": chat.tokenizer.hash}, {"format": chat.name}


# A process opens each of these once, not once for each chunk: an index, a model or a long record may be large.
# A format remembers the token ids of the pieces that it has seen.
_retriever = lru_cache(maxsize=8)(open_retriever)
_verifier = lru_cache(maxsize=2)(open_verifier)
_policy = lru_cache(maxsize=2)(open_policy)


@lru_cache(maxsize=2)
def _student(folder: str, config: Config) -> ChatFormat:
    from harness1.models.open import format_at

    return format_at(folder, config)


async def run_jobs(
    jobs: Iterable[Job] | AsyncIterable[Job],
    play: Callable[[Job], Awaitable[Played]],
    finish: Callable[[Played], Awaitable[Result]],
    on_result: Callable[[Result], None],
    places: int,
    on_depths: OnDepths = ignore_depths,
) -> None:
    """Play jobs, `places` at a time, and finish (mostly: score) as many at a time. A job that waits to be finished
    takes the place of a playing one only if as many wait already, and a job is taken from the source when there is a
    place for it, so that a slow consumer slows the source down (as POLAR's dispatcher, arXiv 2605.24220, and
    SkyRL-Agent's, arXiv 2511.16108). Cancelling this cancels all jobs. An error of the source is raised after the jobs
    taken from it have ended, one of a job or `on_result` after all other jobs at work were cancelled."""
    playing, waiting, finishing = (asyncio.Semaphore(places) for _ in range(3))
    depths = Counter(dict.fromkeys(("playing", "waiting to be scored", "being scored"), 0))
    on_depths(lambda: depths)

    @contextmanager
    def hold(place: asyncio.Semaphore, stage: str) -> Iterator[None]:
        depths[stage] += 1
        try:
            yield
        finally:
            depths[stage] -= 1
            place.release()

    async def carry(job: Job) -> None:
        with hold(playing, "playing"):
            played = await play(job)
            await waiting.acquire()
        with hold(waiting, "waiting to be scored"):
            await finishing.acquire()
        with hold(finishing, "being scored"):
            on_result(await finish(played))

    async def feed() -> None:
        async with aclosing(_each(jobs)) as source:
            await playing.acquire()
            async for job in source:
                carriers.create_task(carry(job))
                await playing.acquire()

    try:
        async with asyncio.TaskGroup() as carriers:
            feeding = asyncio.create_task(feed())
            try:
                await asyncio.wait({feeding})
            finally:
                feeding.cancel()
                await asyncio.wait({feeding})
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group.exceptions[0].__cause__
    await feeding


async def _each(jobs: Iterable[Job] | AsyncIterable[Job]) -> AsyncGenerator[Job, None]:
    if isinstance(jobs, AsyncIterable):
        async for job in jobs:
            yield job
    else:
        for job in jobs:
            yield job


async def return_unchanged(value: Played) -> Played:
    """Return the value: the `finish` of jobs that are not scored."""
    return value


async def play_in_loop(
    setups: Sequence[EpisodeSetup],
    policy: Policy,
    jobs: Jobs,
    on_episode: OnEpisode,
    on_depths: OnDepths = ignore_depths,
) -> None:
    """Play jobs in this event loop, which a model shares with its episodes, within the limits of the first setup, and
    hand over each scored episode. An infrastructure fault breaks only its episode; any other error ends all."""
    retrievers = [setup.open_retriever() for setup in setups]

    async def play(job: EpisodeJob) -> tuple[EpisodeJob, Episode, float]:
        setup, retriever = setups[job.setup], retrievers[job.setup]
        try:
            episode = await job.play(setup.environment(retriever, policy), policy)
        except InfrastructureFault as fault:
            hashes = Hashes(env_hash(setup.config.env), policy.hash, retriever.info.index_hash)
            episode = job.broken(hashes, f"{type(fault).__name__}: {fault}")
        return job, episode, time.perf_counter()

    async def score_played(played: tuple[EpisodeJob, Episode, float]) -> Episode:
        job, episode, ended = played
        if job.task.gold is None:
            return episode
        try:
            # In a thread: decoding goes on meanwhile.
            episode = await asyncio.to_thread(score, episode, job.task.gold, setups[job.setup].config)
        except InfrastructureFault as fault:
            broken = {"stop_reason": StopReason.FAULT, "status": Status.INFRA_ERROR, "error": f"scoring: {fault}"}
            episode = msgspec.structs.replace(episode, **broken)
        waited = round((time.perf_counter() - ended) * 1000, 3)
        return msgspec.structs.replace(episode, stage_ms=episode.stage_ms | {"scoring": waited})

    await run_jobs(jobs, play, score_played, on_episode, setups[0].config.machine.concurrency, on_depths)


def run_episodes(
    setup: EpisodeSetup, jobs: Sequence[EpisodeJob], on_episode: OnEpisode, on_depths: OnDepths = ignore_depths
) -> None:
    """Play all jobs, those of a policy that is no language model over worker processes, which share the memory-mapped
    index. Raises InfrastructureFault: a worker process died; KeyboardInterrupt, after the running chunks ended."""
    machine = setup.config.machine
    if is_model(setup.policy):
        asyncio.run(play_in_loop([setup], setup.policy_for(jobs), jobs, on_episode, on_depths))
        return
    workers = 1 if setup.own is not None else min(machine.workers or os.cpu_count() or 1, max(1, len(jobs) // FEW))
    size = min(machine.concurrency, -(-len(jobs) // workers) or 1)
    chunks = deque(jobs[start : start + size] for start in range(0, len(jobs), size))
    if workers > 1:
        refuse_session_names(setup)
    workers = min(workers, len(chunks) or 1)  # a pool starts a process for a chunk, so others would be missed as dead
    if workers > 1:
        _run_in_processes(setup.share(workers), chunks, workers, on_episode, on_depths)
        return
    for chunk in chunks:
        for episode in run_chunk(setup, chunk):
            on_episode(episode)


def run_chunk(setup: EpisodeSetup, jobs: Sequence[EpisodeJob]) -> list[Episode]:
    """Play a few jobs concurrently in this process, and score them."""

    async def play_all() -> list[Episode]:
        retriever, policy = setup.open_retriever(), setup.policy_for(jobs)

        async def play(job: EpisodeJob) -> Episode:
            episode = await job.play(setup.environment(retriever, policy), policy)
            return score(episode, job.task.gold, setup.config) if job.task.gold is not None else episode

        return await asyncio.gather(*map(play, jobs))

    return asyncio.run(play_all())


def refuse_session_names(setup: EpisodeSetup) -> None:
    """Raise UsageError if a setup names what was typed into this process, which others do not have."""
    for name in (*setup.config.env.plugins, *setup.config.reward.others, setup.policy):
        if is_of_session(name):
            why = f"{short_name(name)} was typed into this session, where worker processes cannot find it"
            raise UsageError(f"{why}: put it in a file, or play with machine.workers=1")


def _run_in_processes(
    setup: EpisodeSetup, chunks: deque[Sequence[EpisodeJob]], workers: int, on_episode: OnEpisode, on_depths: OnDepths
) -> None:
    """Keep two chunks per worker in flight, so that memory stays bounded however many jobs there are."""
    import multiprocessing
    from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
    from concurrent.futures.process import BrokenProcessPool

    def submit(count: int) -> set[Future[list[bytes]]]:
        taken = [chunks.popleft() for _ in range(min(count, len(chunks)))]
        return {pool.submit(_run_encoded, setup, chunk) for chunk in taken}

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker) as pool:
        running = submit(2 * workers)
        on_depths(lambda: {"chunks waiting": len(chunks), "in flight": len(running)})
        try:
            while running:
                done = wait(running, POLL_S, return_when=FIRST_COMPLETED).done
                if not done and len(children := multiprocessing.active_children()) < workers:
                    # A worker died while it was sending a result: it held the lock of the queue, and the pool notices
                    # only when no writing end of the pipe is open.
                    for child in children:
                        child.kill()
                    queue: Any = pool._result_queue
                    queue._writer.close()
                _hand_over(done, running, on_episode)
                running |= submit(len(done))
        except KeyboardInterrupt:
            begun = {future for future in running if not future.cancel()}
            _hand_over(wait(begun).done, begun, on_episode)
            raise
        except BrokenProcessPool as error:
            raise InfrastructureFault("a worker process died; run the same command again to go on") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _hand_over(done: set[Future[list[bytes]]], running: set[Future[list[bytes]]], on_episode: OnEpisode) -> None:
    """Hand over what is done, each episode once, though an interrupt may come at any time: a chunk is in `running`, and
    an episode in its result, until then. A worker that died has no result."""
    for future in sorted(done, key=lambda each: each.exception() is not None):
        lines = future.result()
        while lines:
            on_episode(decode_episode(lines[0]))
            del lines[0]
        running.discard(future)


def _run_encoded(setup: EpisodeSetup, jobs: Sequence[EpisodeJob]) -> list[bytes]:
    return [encode_episode(episode) for episode in run_chunk(setup, jobs)]


def _begin_worker() -> None:
    """Leave interrupts to the parent, and end with it; otherwise a worker would wait for work forever."""
    from multiprocessing import connection, parent_process

    def end_after(sentinel: int) -> None:
        connection.wait([sentinel])
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent := parent_process():
        threading.Thread(target=end_after, args=(parent.sentinel,), daemon=True).start()
