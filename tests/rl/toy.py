"""A game with no environment behind it, for tests of what trains: two turns of four tokens each, on a real small model.

The reward is the share of sampled tokens below 128 of a vocabulary of 300, plus a step per task, so that a policy can
learn it in a few batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from harness1.config import Config, load_config
from harness1.episodes.jobs import EpisodeJob, Jobs, OnEpisode, return_unchanged, run_jobs
from harness1.models.transformers_backend import TransformersBackend, open_transformers
from harness1.plain import digest
from harness1.policy.language_model import call_seed
from harness1.records import (
    DocId,
    Episode,
    Gold,
    Hashes,
    ModelCall,
    RewardRecord,
    RewardTerm,
    Sampling,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
)
from harness1.rl.groups import PlacedTask

TURNS, LENGTH = 2, 4
GOOD = 128  # tokens below are good
ALL_AT_ONCE = 64


def toy_tasks(count: int) -> list[PlacedTask]:
    gold = Gold(relevant={DocId("d"): 1})
    return [PlacedTask(Task(f"toy-{n}", f"task {n}", "train", gold)) for n in range(count)]


def open_toy(folder: Path, rows: int = 16) -> TransformersBackend:
    """With one row, what is decoded beside a call does not depend on time, and nothing is rounded otherwise."""
    return open_transformers(folder, device="cpu", dtype="float32", threads=1, rows=rows, cache_tokens=0)


class ToyRollouts:
    """`Rollouts` of the game. `latency` is slept before every episode; `broken` names episodes that fail."""

    def __init__(
        self,
        backend: TransformersBackend,
        latency: Callable[[EpisodeJob], float] = lambda job: 0.0,
        broken: Callable[[EpisodeJob], bool] = lambda job: False,
        price: Callable[[Episode], float] | None = None,
    ) -> None:
        self.backend, self.latency, self.broken, self.price = backend, latency, broken, price or share_of_good
        self.published: list[int] = []

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        await run_jobs(jobs, self.play, return_unchanged, on_episode, ALL_AT_ONCE)

    async def publish(self, state: Mapping[str, Tensor], version: int) -> None:
        await self.backend.load_state(state, version)
        self.published.append(version)

    async def play(self, job: EpisodeJob) -> Episode:
        await asyncio.sleep(self.latency(job))
        turns, segments = [], {}
        for at in range(TURNS):
            prompt = tuple(100 + int(each, 16) for each in digest([job.task.task_id, at])[:6])
            sampling = Sampling(max_tokens=LENGTH, seed=call_seed(str(job.seed), at, 0))
            output = await self.backend.generate(prompt, sampling)
            call = ModelCall(
                call_id=f"{at}.0",
                prompt=(f"p{at}",),
                output_ids=output.output_ids,
                output_logprobs=output.output_logprobs,
                sampling=sampling,
                policy_version_start=output.version_start,
                policy_version_end=output.version_end,
            )
            segments[f"p{at}"] = prompt
            turns.append(Turn(index=at, calls=(call,), action=ToolCall("search_corpus", {"query": "x"})))
        versions = [call.policy_version_start for turn in turns for call in turn.calls]
        broken = self.broken(job)
        episode = Episode(
            episode_id=f"{job.task.task_id}/{job.sample_idx}",
            task=job.task.public(),
            sample_idx=job.sample_idx,
            group_id=job.group_id,
            turns=tuple(turns),
            stop_reason=StopReason.FAULT if broken else StopReason.TURN_LIMIT,
            status=Status.INFRA_ERROR if broken else Status.COMPLETED,
            error="planted" if broken else None,
            hashes=Hashes("env", "policy", "index"),
            policy_versions=(min(versions), max(versions)),
            segments=segments,
        )
        value = self.price(episode)
        reward = None if broken else RewardRecord(value, {"good": RewardTerm(value, 1.0)})
        return msgspec.structs.replace(episode, reward=reward)


def share_of_good(episode: Episode) -> float:
    ids = [token for turn in episode.turns for call in turn.calls for token in call.output_ids]
    return sum(token < GOOD for token in ids) / len(ids)


def toy_config(overrides: list[str] | None = None) -> Config:
    """A batch is four groups of four; a rate at which the game is learned in some ten batches."""
    plain = [
        *("rl.groups=4", "rl.samples=4", "rl.substeps=1", "rl.batches=10", "train.rate=1e-2", "train.lora.rank=0"),
        *("train.schedule=constant", "train.dtype=float32", "train.save_every=1", "train.watch.every=0"),
        *("train.watch.tasks=4", "train.watch.metric=reward", "machine.threads=1"),
    ]
    return load_config(None, plain + (overrides or []))
