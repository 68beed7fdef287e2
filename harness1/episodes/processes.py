"""Play many episodes over worker processes, for policies without a model; a model plays in one loop (`staged`).

Threads gain nothing here, because an episode is Python work; processes share the memory-mapped index.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any

from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, OnDepths, OnEpisode, ignore_depths
from harness1.episodes.staged import run_staged
from harness1.errors import InfrastructureFault, UsageError
from harness1.models.spec import is_model
from harness1.plugins import is_of_session, short_name
from harness1.policy.policy import Policy
from harness1.records import Episode, decode_episode, encode_episode
from harness1.retrieval.open import is_exclusive
from harness1.retrieval.protocol import Retriever
from harness1.reward import score

POLL_S = 2.0
"""Seconds without a result after which the workers are counted."""

FEW = 4
"""Number of episodes that is too small to justify starting another worker process."""


def run_episodes(
    setup: EpisodeSetup, jobs: Sequence[EpisodeJob], on_episode: OnEpisode, on_depths: OnDepths = ignore_depths
) -> None:
    """Play all jobs; `on_episode` receives each scored episode as it finishes.

    A language model plays in one event loop; the chunks of any other policy are spread over `machine.workers`.

    Raises:
        InfrastructureFault: a worker process died; finished episodes were handed over, and a resumed run continues.
        KeyboardInterrupt: passed on after the running chunks were handed over.
    """
    if is_model(setup.policy):
        asyncio.run(run_staged(setup, jobs, on_episode, on_depths))
        return
    workers = _workers(setup, len(jobs))
    size = min(setup.config.machine.concurrency, -(-len(jobs) // workers) or 1)
    chunks = deque(jobs[start : start + size] for start in range(0, len(jobs), size))
    if workers > 1:
        refuse_session_names(setup)
    workers = min(workers, len(chunks) or 1)  # a pool starts a process for a chunk, so others would be missed as dead
    if workers == 1:
        for chunk in chunks:
            for episode in run_chunk(setup, chunk):
                on_episode(episode)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker) as pool:
        try:
            _drain(pool, setup.shared_by(workers), chunks, workers, on_episode, on_depths)
        except BrokenProcessPool as error:
            raise InfrastructureFault("a worker process died; run the same command again to go on") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def run_chunk(setup: EpisodeSetup, jobs: Sequence[EpisodeJob]) -> list[Episode]:
    """Play a few jobs concurrently in this process, and score them."""
    return asyncio.run(_chunk(setup, jobs))


async def _chunk(setup: EpisodeSetup, jobs: Sequence[EpisodeJob]) -> list[Episode]:
    retriever, policy = setup.open_retriever(), setup.policy_for(jobs)
    return await asyncio.gather(*(_scored(setup, retriever, policy, job) for job in jobs))


async def _scored(setup: EpisodeSetup, retriever: Retriever, policy: Policy, job: EpisodeJob) -> Episode:
    episode = await job.play(setup.environment(retriever, policy), policy)
    return score(episode, job.task.gold, setup.config) if job.task.gold is not None else episode


def refuse_session_names(setup: EpisodeSetup) -> None:
    """Raise UsageError if a setup names what was typed into this process, which others do not have."""
    for name in (*setup.config.env.plugins, *setup.config.reward.plugins, setup.policy):
        if is_of_session(name):
            raise UsageError(
                f"{short_name(name)} was typed into this session, where worker processes cannot find it: put it in a"
                " file, or play with machine.workers=1"
            )


def _workers(setup: EpisodeSetup, jobs: int) -> int:
    if is_exclusive(setup.retriever) or setup.own is not None:
        return 1
    return min(setup.config.machine.workers or os.cpu_count() or 1, max(1, jobs // FEW))


def _drain(
    pool: ProcessPoolExecutor,
    setup: EpisodeSetup,
    chunks: deque[Sequence[EpisodeJob]],
    workers: int,
    on_episode: OnEpisode,
    on_depths: OnDepths,
) -> None:
    """Keep two chunks per worker in flight, so that memory stays bounded however many jobs there are."""
    running = _submit(pool, setup, chunks, 2 * workers)
    on_depths(lambda: {"chunks waiting": len(chunks), "in flight": len(running)})
    try:
        while running:
            done = wait(running, POLL_S, return_when=FIRST_COMPLETED).done
            if not done and len(multiprocessing.active_children()) < workers:
                _break(pool)
            _hand_over(done, running, on_episode)
            running |= _submit(pool, setup, chunks, len(done))
    except KeyboardInterrupt:
        begun = {future for future in running if not future.cancel()}
        _hand_over(wait(begun).done, begun, on_episode)
        raise


def _submit(
    pool: ProcessPoolExecutor, setup: EpisodeSetup, chunks: deque[Sequence[EpisodeJob]], count: int
) -> set[Future[list[bytes]]]:
    taken = [chunks.popleft() for _ in range(min(count, len(chunks)))]
    return {pool.submit(_encoded_chunk, setup, chunk) for chunk in taken}


def _break(pool: ProcessPoolExecutor) -> None:
    """End a pool whose worker died while it was sending a result: it held the lock of the queue, and the pool waits for
    the rest of the message until no writing end of the pipe is open. Only then does it notice that it is broken."""
    for child in multiprocessing.active_children():
        child.kill()
    queue: Any = pool._result_queue
    queue._writer.close()


def _hand_over(done: set[Future[list[bytes]]], running: set[Future[list[bytes]]], on_episode: OnEpisode) -> None:
    """Hand over what is done, each episode once: a chunk is in `running`, and an episode in its result, until then. An
    interrupt may come at any time, and a worker that died has no result."""
    for future in sorted(done, key=lambda each: each.exception() is not None):
        lines = future.result()
        while lines:
            on_episode(decode_episode(lines[0]))
            del lines[0]
        running.discard(future)


def _encoded_chunk(setup: EpisodeSetup, jobs: Sequence[EpisodeJob]) -> list[bytes]:
    return [encode_episode(episode) for episode in run_chunk(setup, jobs)]


def _begin_worker() -> None:
    """Leave interrupts to the parent, and end with it; otherwise a worker would wait for work forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
