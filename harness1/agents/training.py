"""Play sessions of agents as the episodes of a training: start the command, record its calls, score what it did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness1.agents.evaluation import (
    AgentSession,
    Evaluate,
    Sessions,
    arguments_of,
    episode_of,
    fault_of,
    new_folder,
    open_evaluation,
    remove_folder,
    removing_folder,
    reward_of,
    run_command,
    write_task,
)
from harness1.config import Config, Learn
from harness1.data.leaks import open_filter
from harness1.data.open import from_anywhere, open_source
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, Jobs, OnEpisode, run_jobs
from harness1.errors import InfrastructureFault, UsageError
from harness1.hashing import digest
from harness1.models.fetch import resolve_model
from harness1.models.open import preferred_device
from harness1.models.spec import ModelSpec
from harness1.plugins import identity
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode, Gold, Hashes, Task
from harness1.rl.learning import Learning, OpenRollouts
from harness1.rl.local_rollouts import publish_to
from harness1.rl.open import WEIGHTS
from harness1.rl.task_choice import choose_tasks
from harness1.rl.task_stream import PlacedTask
from harness1.rows.proxy_record import recording
from harness1.serve.chat import ChatRequest, Dialect, Recall
from harness1.serve.proxy import ProxyService, proxy_limits
from harness1.serve.server import answering
from harness1.serve.upstreams import Asked, TokenUpstream
from harness1.sft.earlier_tasks import tasks_of_runs

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


HOST = "127.0.0.1"
Publish = Callable[["Weights", int], Awaitable[None]]


class OnPolicyUpstream(TokenUpstream):
    """A model in training: it samples from its own distribution, whatever temperature an agent asks for."""

    def prepare(self, dialect: Dialect, body: Mapping[str, object], request: ChatRequest, recall: Recall) -> Asked:
        """Do as `Upstream.prepare`."""
        asked = super().prepare(dialect, body, request, recall)
        sampling = msgspec.structs.replace(asked.sampling, temperature=1.0, top_p=1.0, top_k=0)
        return msgspec.structs.replace(asked, sampling=sampling)


@dataclass(frozen=True)
class Agent:
    """An agent and its judge.

    Args:
        command: `{query}` and `{task_id}` stand for those of the task, `{base_url}` for the address of the model.
        evaluate: see `Evaluate`.
        golds: by the ids of the tasks.
        hashes: those of its episodes.
        environment: the variables that it has beside those by which it finds the model.
    """

    command: str
    evaluate: Evaluate
    golds: Mapping[str, Gold | None]
    hashes: Hashes
    environment: Mapping[str, str]


class AgentRollouts:
    """`Rollouts` of sessions in stages: RUN carries out the command in a folder of its own, POST scores what it did."""

    def __init__(
        self, agent: Agent, sessions: Sessions, port: int, folders: Path, config: Config, publish: Publish
    ) -> None:
        self._agent, self._sessions, self._port, self._folders = agent, sessions, port, folders
        self._machine, self._publish = config.machine, publish

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        """Play all jobs, as `Rollouts.run`.

        Raises:
            UsageError: the command cannot be started, or the evaluation returns no numbers.
            Exception: from the evaluation.
        """
        await run_jobs(jobs, self._play, self._scored, on_episode, self._machine.concurrency)

    async def publish(self, state: Weights, version: int) -> None:
        """As `Rollouts.publish`."""
        await self._publish(state, version)

    async def _play(self, job: EpisodeJob) -> tuple[EpisodeJob, AgentSession | str]:
        """Run the agent, and again while the infrastructure fails it; return its session, or the last fault."""
        fault = ""
        for attempt in range(1 + self._machine.agents.retries):
            try:
                session = await self._session(job.task)
            except InfrastructureFault as error:
                fault = str(error)
                await asyncio.sleep(self._machine.backoff_s * 2.0**attempt)
                continue
            if not (fault := fault_of(session)):
                return job, session
            remove_folder(session.folder)
        return job, fault

    async def _session(self, task: Task) -> AgentSession:
        """Run the agent once, in a folder of this attempt."""
        folder = new_folder(self._folders)
        try:
            return await self._session_in(folder, task)
        except BaseException:
            remove_folder(folder)
            raise

    async def _session_in(self, folder: Path, task: Task) -> AgentSession:
        machine = self._machine
        write_task(task, folder)
        opened = self._sessions.start()
        address = f"http://{HOST}:{self._port}"
        values = {"query": task.query, "task_id": task.task_id, "base_url": f"{address}/v1"}
        given = {
            **self._agent.environment,
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_KEY": opened.name,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": opened.name,
        }
        try:
            words = arguments_of(self._agent.command, values)
            ended = await run_command(words, folder, given, machine.episode_deadline_s, machine.agents.output_bytes)
        finally:
            calls = await self._sessions.end(opened)
        whole = msgspec.structs.replace(task, gold=self._agent.golds.get(task.task_id))
        return AgentSession(
            name=opened.name,
            task=whole,
            folder=folder,
            calls=calls,
            output=ended.output,
            exit_code=ended.exit_code,
            cut=ended.cut,
        )

    async def _scored(self, ran: tuple[EpisodeJob, AgentSession | str]) -> Episode:
        job, session = ran
        if isinstance(session, str):
            return job.broken(self._agent.hashes, session)
        try:
            reward = await asyncio.to_thread(reward_of, self._agent.evaluate, session)
            return episode_of(job, session, reward, self._agent.hashes)
        except InfrastructureFault as fault:
            return job.broken(self._agent.hashes, f"evaluation: {fault}")
        finally:
            remove_folder(session.folder)


@asynccontextmanager
async def agent_rollouts(
    agent: Agent, upstream: OnPolicyUpstream, record: Path, config: Config, publish: Publish
) -> AsyncIterator[AgentRollouts]:
    """Open the rollouts of an agent, and the proxy by which it reaches the model and which records its calls.

    Raises:
        UsageError: as `recording`.
        InfrastructureFault: there is no room for the folders of the agents.
    """
    with recording(record, upstream.inputs) as recorder, removing_folder(new_folder()) as folders:
        sessions = Sessions(recorder.append, config.machine.agents)
        service = ProxyService(upstream, sessions, proxy_limits(config), admit=sessions.admit)
        async with answering(service.app, service.limits, HOST, 0) as port:
            yield AgentRollouts(agent, sessions, port, folders, config, publish)


SESSIONS = "sessions"
"""The record of all calls, below the folder of the training."""


def learning_on_agents(
    config: Config,
    learn: Learn,
    out: Path,
    policy: LanguageModelPolicy,
    command: str,
    evaluation: str,
    environment: Mapping[str, str],
) -> tuple[Learning, OpenRollouts]:
    """Open a training run on the sessions of an agent with the tasks of datasets.

    Args:
        command: see `Agent`.
        evaluation: `MODULE:FUNCTION` or `FILE.py:FUNCTION`.
        environment: the environment variables of the agent.

    Raises:
        UsageError: the evaluation or the tasks cannot be opened, two tasks have one id, or the settings are those of
            episodes in the environment.
    """
    arguments_of(command, {})
    if config.machine.fleet.workers or config.train.watch.metric != "reward":
        raise UsageError("agents have rewards alone: set machine.fleet.workers=0 and train.watch.metric=reward")
    sources = [open_source(data) for data in learn.data]
    taught = {(source.name, learn.split) for source in sources}
    excluded = tasks_of_runs(learn.exclude)
    sieve = open_filter(config.data, sources, taught, share=learn.share, against=learn.against, excluded=excluded)
    tasks, held_out, selections = choose_tasks(sources, learn.split, [None] * len(sources), config, sieve)
    golds = {placed.task.task_id: placed.task.gold for placed in (*tasks, *held_out)}
    if len(golds) < len(tasks) + len(held_out):
        raise UsageError("two tasks of the datasets have the same id: train on one dataset at a time")
    base = resolve_model(ModelSpec.read(learn.model).model)
    known = {"command": command, "evaluate": identity(evaluation)}
    hashes = Hashes(env=digest(known), policy=policy.hash, index="")
    agent = Agent(command, open_evaluation(evaluation), golds, hashes, environment)

    async def publish(state: Weights, version: int) -> None:
        await publish_to(policy.model, state, version, base, out / WEIGHTS)

    upstream = OnPolicyUpstream(learn.model, policy.model, policy.counter, config)
    work = Learning(
        tasks=_public(tasks),
        held_out=_public(held_out),
        setups=[EpisodeSetup(config, "", learn.model)],
        base=base,
        out=out,
        config=config,
        device=config.machine.model.device or preferred_device(),
        datasets=[from_anywhere(data) for data in learn.data],
        split=learn.split,
        selections=selections,
        played_with=known,
    )
    return work, agent_rollouts(agent, upstream, out / SESSIONS, config, publish)


def _public(placed: Sequence[PlacedTask]) -> list[PlacedTask]:
    """Return tasks without their gold: the metrics of our environment say nothing about an agent."""
    return [msgspec.structs.replace(each, task=each.task.public(), setup=0) for each in placed]
