"""Describe many episodes: a job for each, and the setup that all are played in."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import msgspec

from harness1.config import Config
from harness1.env.environment import SearchEnv
from harness1.env.model_verifiers import open_verifier
from harness1.env.pieces import TokenCounter
from harness1.env.verifiers import Verifier
from harness1.episodes.rollout import rollout
from harness1.hashing import digest
from harness1.policy.policy import Policy, counter_of
from harness1.policy.registry import needs_gold, open_policy
from harness1.records import Episode, Hashes, Record, Status, StopReason, Task
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import Retriever

if TYPE_CHECKING:
    from harness1.models.chat_format import ChatFormat

Depths = Callable[[], Mapping[str, int]]
"""Counts the jobs in each queue at the moment of the call, which any thread may make."""
OnDepths = Callable[[Depths], None]
"""Called once, as soon as there are queues."""
OnEpisode = Callable[[Episode], None]
"""Called once for each job, in no fixed order, with its finished episode."""


class EpisodeJob(Record):
    """One episode to play; the task carries its gold, which only scoring and the oracles see."""

    task: Task
    sample_idx: int = 0
    seed: int = 0
    group_id: str | None = None
    setup: int = 0
    """The position of its setup, if there are several."""

    async def play(self, env: SearchEnv, policy: Policy) -> Episode:
        """Play the episode; it is not scored."""
        return await rollout(env, policy, self.task, seed=self.seed, sample_idx=self.sample_idx, group_id=self.group_id)

    def broken(self, hashes: Hashes, error: str) -> Episode:
        """Make the record of the episode if a fault ended it outside its turns."""
        return Episode(
            episode_id=digest([self.task.public(), self.sample_idx, self.seed, hashes])[:16],
            task=self.task.public(),
            sample_idx=self.sample_idx,
            group_id=self.group_id,
            seed=self.seed,
            stop_reason=StopReason.FAULT,
            status=Status.INFRA_ERROR,
            hashes=hashes,
            error=error,
        )


Jobs = Iterable[EpisodeJob] | AsyncIterable[EpisodeJob]
"""A source of jobs, read as there is room for them."""


@dataclass(frozen=True)
class EpisodeSetup:
    """The setting in which jobs are played: plain values, so that it can be sent to a worker process."""

    config: Config
    retriever: str
    policy: str
    reasoned: bool = False
    """Ask the policy for a reason with every call."""
    student: str = ""
    """The tokenizer folder of the student, the model that learns from the episodes; they are recorded in its format
    (`policy.format`). Empty: no student."""
    own: Policy | None = None
    """The policy itself, where it is an object of this process; `policy` is its name then."""

    def open_retriever(self) -> Retriever:
        """Return the retriever, opened once in each process."""
        return _retriever(self.retriever, self.config)

    def environment(self, retriever: Retriever, policy: Policy) -> SearchEnv:
        """Make an environment that counts tokens as the policy does."""
        return SearchEnv(self.config.env, retriever, _verifier(self.config), counter_of(policy), self.config.machine)

    def shared_by(self, workers: int) -> EpisodeSetup:
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
            policy = _policy(self.policy, self.config)
        if not (self.reasoned or self.student):
            return policy
        from harness1.policy.wrappers import ReasonedPolicy, in_student_format

        if self.reasoned:
            policy = ReasonedPolicy(policy)
        return in_student_format(policy, _student(self.student, self.config)) if self.student else policy


def counted_with(counter: TokenCounter) -> tuple[dict[str, str], dict[str, str]]:
    """Return what the card of a run says of its counter: hashes, and the chat `format` if a model reads the tokens."""
    if not hasattr(counter, "tokenizer"):
        return {"counter": counter.hash}, {}
    chat = cast("ChatFormat", counter)
    return {"counter": chat.hash, "tokenizer": chat.tokenizer.hash}, {"format": chat.name}


def ignore_depths(_: Depths) -> None:
    """Ignore the queues."""


# A process opens each of these once, not once for each chunk: an index, a model or a long record may be large.
# A format remembers the token ids of the pieces that it has seen.
_retriever = lru_cache(maxsize=8)(open_retriever)


@lru_cache(maxsize=2)
def _verifier(config: Config) -> Verifier:
    """Return one verifier, which batches the questions of all episodes of the process."""
    return open_verifier(config.env, config.machine)


@lru_cache(maxsize=2)
def _student(folder: str, config: Config) -> ChatFormat:
    from harness1.models.open import format_at

    return format_at(folder, config)


@lru_cache(maxsize=2)
def _policy(spec: str, config: Config) -> Policy:
    return open_policy(spec, {}, config)
