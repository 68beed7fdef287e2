"""Play many episodes in one event loop, which a language model shares with its episodes.

Environments are opened while other episodes run, and an episode that waits for its score does not take the slot of a
running one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from harness1.env.environment import SearchEnv, env_hash
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, Jobs, OnDepths, OnEpisode, ignore_depths
from harness1.episodes.stages import Finished, Pipeline, StageFailure, StageLimits
from harness1.errors import InfrastructureFault
from harness1.policy.policy import Policy
from harness1.records import Episode, Hashes, Status, StopReason
from harness1.reward import score

RECORDED = ("ready", "post_wait", "post")
"""Stages whose milliseconds are added to an episode's own."""


async def run_staged(
    setup: EpisodeSetup, jobs: Sequence[EpisodeJob], on_episode: OnEpisode, on_depths: OnDepths = ignore_depths
) -> None:
    """Play the jobs of one setup with its own policy, as `play_staged`."""
    await play_staged([setup], setup.policy_for(jobs), jobs, on_episode, on_depths)


async def play_staged(
    setups: Sequence[EpisodeSetup],
    policy: Policy,
    jobs: Jobs,
    on_episode: OnEpisode,
    on_depths: OnDepths = ignore_depths,
) -> None:
    """Play jobs, and hand over each scored episode as it finishes.

    An infrastructure fault in any stage breaks only that episode, and its record says so.

    Args:
        setups: indexed by `EpisodeJob.setup`; the limits are those of the first.

    Raises:
        HarnessError: any other error of a policy, an environment or a score; it ends all episodes.
    """
    stages = _EpisodeStages(setups, policy, on_episode)
    limits = StageLimits.equal(setups[0].config.machine.concurrency)
    pipeline = Pipeline(limits, stages.init, stages.run, stages.post, stages.hand_over)
    on_depths(lambda: pipeline.depths)
    await pipeline.process(jobs)


class _EpisodeStages:
    """The stages of an episode: open its environment, play it, score it, hand it over."""

    def __init__(self, setups: Sequence[EpisodeSetup], policy: Policy, on_episode: OnEpisode) -> None:
        self._setups, self._policy, self._on_episode = setups, policy, on_episode
        self._retrievers = [setup.open_retriever() for setup in setups]

    async def init(self, job: EpisodeJob) -> tuple[EpisodeJob, SearchEnv]:
        return job, self._setups[job.setup].environment(self._retrievers[job.setup], self._policy)

    async def run(
        self, prepared: tuple[EpisodeJob, SearchEnv], keep: Callable[[tuple[EpisodeJob, Episode]], None]
    ) -> tuple[EpisodeJob, Episode]:
        job, env = prepared
        return job, await job.play(env, self._policy)

    async def post(self, ran: tuple[EpisodeJob, Episode]) -> Episode:
        job, episode = ran
        if job.task.gold is None:
            return episode
        try:
            # In a thread: decoding goes on meanwhile.
            return await asyncio.to_thread(score, episode, job.task.gold, self._setups[job.setup].config)
        except InfrastructureFault as fault:
            broken = {"stop_reason": StopReason.FAULT, "status": Status.INFRA_ERROR, "error": f"scoring: {fault}"}
            return msgspec.structs.replace(episode, **broken)

    def hand_over(self, job: EpisodeJob, outcome: Finished[Episode] | StageFailure) -> None:
        if isinstance(outcome, Finished):
            waits = {stage: round(ms, 3) for stage, ms in outcome.ms.items() if stage in RECORDED}
            self._on_episode(msgspec.structs.replace(outcome.result, stage_ms=outcome.result.stage_ms | waits))
            return
        if outcome.kind == "fault" and not isinstance(outcome.cause, InfrastructureFault):
            raise outcome.exception
        index_hash = self._retrievers[job.setup].info.index_hash
        hashes = Hashes(env_hash(self._setups[job.setup].config.env), self._policy.hash, index_hash)
        self._on_episode(job.broken(hashes, f"{outcome.stage}: {outcome.error}"))
