"""Many episodes in one loop, always bounded; what of it is needed to send them elsewhere is plain."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from harness1.config import Config
from harness1.env.environment import SearchEnv, env_hash
from harness1.env.verifiers.open import open_verifier
from harness1.env.verifiers.protocol import Verifier
from harness1.episodes.rollout import rollout
from harness1.episodes.stages import Finished, Pipeline, StageFailure, StageLimits, StageName
from harness1.errors import HarnessError, InfrastructureFault
from harness1.hashing import digest
from harness1.models.formats.chat_format import ChatFormat
from harness1.models.open import format_at
from harness1.policy.policy import Policy, counter_of
from harness1.policy.registry import needs_gold, open_policy
from harness1.policy.wrappers import ReasonedPolicy, in_student_format
from harness1.records import Episode, Gold, Hashes, Record, Status, StopReason, Task
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import Retriever
from harness1.reward.composite import score

Scorable = tuple["EpisodeJob", Episode]
Depths = Callable[[], Mapping[str, int]]
"""How much there is in each queue at the moment of the call, which any thread may make."""
OnDepths = Callable[[Depths], None]
"""Called once, when there are queues."""


class EpisodeJob(Record):
    """One episode to run; the task carries its gold, which only scoring and the oracle see."""

    task: Task
    sample_idx: int = 0
    seed: int = 0
    group_id: str | None = None
    setup: int = 0
    """Which of several benches it is for."""


@dataclass(frozen=True)
class EpisodeSetup:
    """What a worker process needs to run episodes: all of it plain, so that it can be sent there."""

    config: Config
    retriever: str
    policy: str
    reasoned: bool = False
    """Whether the policy is asked for a reason with every call."""
    student: str = ""
    """Where the tokenizer lies of the model that is to learn from the episodes: they are spoken in its format
    (`policy.format`); empty: there is none."""

    def environment(self, retriever: Retriever, policy: Policy) -> SearchEnv:
        """An environment that counts tokens as the policy does."""
        return SearchEnv(self.config.env, retriever, _verifier(self.config), counter_of(policy), self.config.machine)

    def shared_by(self, workers: int) -> EpisodeSetup:
        """The same, with the cores shared among worker processes, each of which may load a model."""
        machine = self.config.machine
        threads = machine.threads or max(1, (os.cpu_count() or 1) // workers)
        config = msgspec.structs.replace(self.config, machine=msgspec.structs.replace(machine, threads=threads))
        return replace(self, config=config)

    def policy_for(self, jobs: Sequence[EpisodeJob]) -> Policy:
        policy = self._asked_policy(jobs)
        if self.reasoned:
            policy = ReasonedPolicy(policy)
        return in_student_format(policy, _student(self.student, self.config)) if self.student else policy

    def _asked_policy(self, jobs: Sequence[EpisodeJob]) -> Policy:
        if not needs_gold(self.policy):
            return _policy(self.policy, self.config)
        golds: dict[str, Gold] = {job.task.task_id: job.task.gold for job in jobs if job.task.gold is not None}
        return open_policy(self.policy, golds, self.config)


def ignore_depths(_: Depths) -> None:
    """What is called where nobody looks at the queues."""


def run_chunk(setup: EpisodeSetup, jobs: Sequence[EpisodeJob]) -> list[Episode]:
    """Run a few jobs concurrently in this process and score them."""
    return asyncio.run(_gather(setup, jobs))


async def _gather(setup: EpisodeSetup, jobs: Sequence[EpisodeJob]) -> list[Episode]:
    retriever = _retriever(setup.retriever, setup.config)
    policy = setup.policy_for(jobs)

    async def one(job: EpisodeJob) -> Episode:
        env = setup.environment(retriever, policy)
        episode = await played(env, policy, job)
        return score(episode, job.task.gold, setup.config) if job.task.gold is not None else episode

    return list(await asyncio.gather(*(one(job) for job in jobs)))


async def played(env: SearchEnv, policy: Policy, job: EpisodeJob) -> Episode:
    """The episode of a job, not yet scored."""
    return await rollout(env, policy, job.task, seed=job.seed, sample_idx=job.sample_idx, group_id=job.group_id)


async def run_staged(
    setup: EpisodeSetup,
    jobs: Sequence[EpisodeJob],
    on_episode: Callable[[Episode], None],
    on_depths: OnDepths = ignore_depths,
) -> None:
    """Run the jobs of one bench with its own policy, as `play_staged`."""
    await play_staged([setup], setup.policy_for(jobs), jobs, on_episode, on_depths)


async def play_staged(
    setups: Sequence[EpisodeSetup],
    policy: Policy,
    jobs: Iterable[EpisodeJob] | AsyncIterable[EpisodeJob],
    on_episode: Callable[[Episode], None],
    on_depths: OnDepths = ignore_depths,
) -> None:
    """Run jobs in one loop, which a language model shares with its episodes: environments are made ready while others
    run, and an episode that waits for its score holds no place of those that run.

    A fault in one stage ends that episode, which says so; what is nobody's fault but the user's or ours ends the run.

    Args:
        benches: what `EpisodeJob.setup` names; limits are those of the first.

    Raises:
        HarnessError: what a policy, an environment or a score raised that is no fault of the infrastructure.
    """
    retrievers = [_retriever(setup.retriever, setup.config) for setup in setups]

    def environment(job: EpisodeJob) -> SearchEnv:
        return setups[job.setup].environment(retrievers[job.setup], policy)

    async def init(job: EpisodeJob) -> tuple[EpisodeJob, SearchEnv]:
        return job, environment(job)

    async def run(prepared: tuple[EpisodeJob, SearchEnv], keep: Callable[[Scorable], None]) -> Scorable:
        job, env = prepared
        return job, await played(env, policy, job)

    async def post(ran: Scorable) -> Episode:
        job, episode = ran
        if job.task.gold is None:
            return episode
        try:
            # In a thread: decoding goes on meanwhile.
            return await asyncio.to_thread(score, episode, job.task.gold, setups[job.setup].config)
        except InfrastructureFault as fault:
            broken = {"stop_reason": StopReason.FAULT, "status": Status.INFRA_ERROR, "error": f"scoring: {fault}"}
            return msgspec.structs.replace(episode, **broken)

    def hand_over(job: EpisodeJob, outcome: Finished[Episode] | StageFailure) -> None:
        if isinstance(outcome, Finished):
            on_episode(msgspec.structs.replace(outcome.result, stage_ms=outcome.result.stage_ms | _waits(outcome.ms)))
        elif outcome.kind == "fault" and not isinstance(outcome.cause, InfrastructureFault):
            raise outcome.cause or HarnessError(outcome.error)
        else:
            index = retrievers[job.setup].info.index_hash
            hashes = Hashes(env_hash(setups[job.setup].config.env), policy.hash, index)
            on_episode(broken_episode(job, hashes, f"{outcome.stage}: {outcome.error}"))

    places = setups[0].config.machine.concurrency
    limits = StageLimits(init=places, ready=places, run=places, post=places)
    pipeline = Pipeline(limits, init, run, post, hand_over)
    on_depths(lambda: pipeline.depths)
    await pipeline.process(jobs)


def _waits(ms: Mapping[StageName, float]) -> dict[str, float]:
    return {stage: round(ms[stage], 3) for stage in ms if stage in ("ready", "post_wait", "post")}


def broken_episode(job: EpisodeJob, hashes: Hashes, error: str) -> Episode:
    """The record of an episode that a fault ended outside of its turns."""
    return Episode(
        episode_id=digest([job.task.public(), job.sample_idx, job.seed, hashes])[:16],
        task=job.task.public(),
        sample_idx=job.sample_idx,
        group_id=job.group_id,
        seed=job.seed,
        stop_reason=StopReason.FAULT,
        status=Status.INFRA_ERROR,
        hashes=hashes,
        error=error,
    )


@lru_cache(maxsize=8)
def _retriever(spec: str, config: Config) -> Retriever:
    """An index is opened once for each process, not once for each chunk."""
    return open_retriever(spec, config)


@lru_cache(maxsize=2)
def _verifier(config: Config) -> Verifier:
    """A verifier may hold a model, and gathers what the episodes of a process ask."""
    return open_verifier(config.env, config.machine)


@lru_cache(maxsize=2)
def _policy(spec: str, config: Config) -> Policy:
    """A policy is made once for each process: its model, or the record that it repeats, may be large."""
    return open_policy(spec, {}, config)


@lru_cache(maxsize=2)
def _student(place: str, config: Config) -> ChatFormat:
    """A format remembers the ids of the pieces that it has seen, for all chunks of a process."""
    return format_at(place, config)
