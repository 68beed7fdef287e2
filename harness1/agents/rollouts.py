"""Play sessions of agents as the episodes of a training: start the command, record its calls, score what it did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness1.agents.episode import episode_of, fault_of
from harness1.agents.evaluation import AgentSession, Evaluate, reward_of
from harness1.agents.folders import new_folder, remove, removed_at_end, write_task
from harness1.agents.process import arguments_of, run_command
from harness1.agents.sessions import Sessions
from harness1.config import Config
from harness1.episodes.jobs import EpisodeJob, Jobs, OnEpisode
from harness1.episodes.stages import Pipeline, StageLimits, results_to, unchanged
from harness1.errors import InfrastructureFault
from harness1.records import Episode, Gold, Hashes, Task
from harness1.rows.proxy_record import recording
from harness1.serve.proxy.chat import ChatRequest
from harness1.serve.proxy.dialect import Dialect
from harness1.serve.proxy.rendering import Recall
from harness1.serve.proxy.service import ProxyService, proxy_limits
from harness1.serve.proxy.token_upstream import TokenUpstream
from harness1.serve.proxy.upstream import Asked
from harness1.serve.server import answering

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
        limits = StageLimits.equal(self._machine.concurrency)
        await Pipeline(limits, unchanged, self._play, self._scored, results_to(on_episode)).process(jobs)

    async def publish(self, state: Weights, version: int) -> None:
        """As `Rollouts.publish`."""
        await self._publish(state, version)

    async def _play(self, job: EpisodeJob, _: object) -> tuple[EpisodeJob, AgentSession | str]:
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
            remove(session.folder)
        return job, fault

    async def _session(self, task: Task) -> AgentSession:
        """Run the agent once, in a folder of this attempt."""
        folder = new_folder(self._folders)
        try:
            return await self._session_in(folder, task)
        except BaseException:
            remove(folder)
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
            remove(session.folder)


@asynccontextmanager
async def agent_rollouts(
    agent: Agent, upstream: OnPolicyUpstream, record: Path, config: Config, publish: Publish
) -> AsyncIterator[AgentRollouts]:
    """Open the rollouts of an agent, and the proxy by which it reaches the model and which records its calls.

    Raises:
        UsageError: as `recording`.
        InfrastructureFault: there is no room for the folders of the agents.
    """
    with recording(record, upstream.inputs) as recorder, removed_at_end(new_folder()) as folders:
        sessions = Sessions(recorder.append, config.machine.agents)
        service = ProxyService(upstream, sessions, proxy_limits(config), admit=sessions.admit)
        async with answering(service.app, service.limits, HOST, 0) as port:
            yield AgentRollouts(agent, sessions, port, folders, config, publish)
