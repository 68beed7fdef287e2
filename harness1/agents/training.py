"""Train the model behind an agent: run its command for each task, record its calls, and score what it did."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness1.agents.evaluation import AgentSession, episode_of
from harness1.agents.judge import Judge
from harness1.agents.process import agent_folder, arguments_of, run_command, sessions_folder
from harness1.agents.sandbox import Sandbox, variables_of
from harness1.config import Config
from harness1.episodes.jobs import EpisodeJob, Jobs, OnEpisode, run_jobs
from harness1.errors import InfrastructureFault, UsageError
from harness1.http.client import Transient, retry
from harness1.plain import digest
from harness1.plugins import identity
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode, Gold, Hashes, Task
from harness1.rl.groups import PlacedTask
from harness1.rl.rollouts import Publish, publish_to
from harness1.rl.train import WEIGHTS, OpenRollouts, Training, TrainingInputs, open_tasks, training_on
from harness1.rows.calls import RecordedCall, recording
from harness1.serve.chat import ChatRequest, Dialect, Recall
from harness1.serve.proxy import ProxyService, proxy_limits
from harness1.serve.server import answering
from harness1.serve.service import Refused
from harness1.serve.upstreams import Asked, TokenUpstream

HOST = "127.0.0.1"
SESSIONS = "sessions"  # the record of all calls, below the folder of the training
SETTLE_S = 5.0  # seconds that the calls of an ended agent have to end
LOOK_S = 0.01
MOST_CALLS, MOST_AT_ONCE = 64, 8
"""Calls of a session to the model in all, and at the same time; further ones are refused."""
MOST_OUTPUT = 1 << 20
"""Bytes that an agent may write to standard output and standard error; one that writes more is ended."""
RETRIES = 2  # times that a session is begun anew after the infrastructure failed it
GROUPS = 3  # groups of six digits in the name of a session: it is all that keeps agents apart


class OnPolicyUpstream(TokenUpstream):
    """A model in training: it samples from its own distribution, whatever temperature an agent asks for."""

    def prepare(self, dialect: Dialect, body: Mapping[str, object], request: ChatRequest, recall: Recall) -> Asked:
        asked = super().prepare(dialect, body, request, recall)
        sampling = msgspec.structs.replace(asked.sampling, temperature=1.0, top_p=1.0, top_k=0)
        return msgspec.structs.replace(asked, sampling=sampling)


@dataclass
class OpenSession:
    """What a session has called so far."""

    name: str
    calls: list[RecordedCall] = field(default_factory=list)
    begun: int = 0
    at_work: int = 0
    ended: bool = False


class Agent(NamedTuple):
    """An agent and its judge."""

    command: str  # `{query}`, `{task_id}`: those of the task; `{base_url}`: of the model; `{folder}`: where it works
    judge: Judge
    golds: Mapping[str, Gold | None]  # by the ids of the tasks
    hashes: Hashes  # those of its episodes
    environment: Mapping[str, str]  # the variables that it inherits
    sandbox: Sandbox


Played = tuple[EpisodeJob, AgentSession, AsyncExitStack] | Episode
"""A session whose folder the stack removes, or the episode of one that a fault broke."""


class AgentRollouts:
    """`Rollouts` of sessions: the command is carried out in a folder of its own, and what it did is scored. It finds
    the model at `port`, where calls of open sessions pass within their bounds; `keep` gets every call."""

    def __init__(
        self, agent: Agent, folders: Path, config: Config, publish: Publish, keep: Callable[[RecordedCall], None]
    ) -> None:
        self._agent, self._folders, self._machine, self._keep = agent, folders, config.machine, keep
        self.publish, self.port = publish, 0
        self._open: dict[str, OpenSession] = {}

    @contextmanager
    def admit(self, name: str | None) -> Iterator[None]:
        """Let a call pass, or refuse it: of no open session, of a session with too many calls in all or at once."""
        session = self._open.get(name or "")
        if session is None or session.ended:
            raise Refused(410, "there is no open session of this name: the agent has ended, or gave another API key")
        if session.begun >= MOST_CALLS:
            raise Refused(429, f"a session has at most {MOST_CALLS} calls")
        if session.at_work >= MOST_AT_ONCE:
            raise Refused(429, f"a session has at most {MOST_AT_ONCE} calls at once")
        session.begun += 1
        session.at_work += 1
        try:
            yield
        finally:
            session.at_work -= 1

    def append(self, call: RecordedCall) -> None:
        self._keep(call)
        if (session := self._open.get(call.session_id)) is not None:
            session.calls.append(call)

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        """Play all jobs, as `Rollouts.run`; UsageError if the command cannot be started."""
        await run_jobs(jobs, self._play, self._score, on_episode, self._machine.concurrency)

    async def _play(self, job: EpisodeJob) -> Played:
        async def once() -> Played:
            try:
                async with AsyncExitStack() as stack:
                    folder = await stack.enter_async_context(agent_folder(self._folders, job.task))
                    session = await self._session(folder, job.task)
                    if fault := session.fault():
                        raise InfrastructureFault(fault)
                    return job, session, stack.pop_all()
            except InfrastructureFault as fault:
                raise Transient(str(fault)) from fault

        try:
            return await retry(once, 1 + RETRIES)
        except InfrastructureFault as fault:
            return job.broken(self._agent.hashes, str(fault))

    async def _session(self, folder: Path, task: Task) -> AgentSession:
        # An API key can carry the name, and nobody guesses it.
        opened = OpenSession("-".join(["session", *(f"{secrets.randbelow(10**6):06}" for _ in range(GROUPS))]))
        self._open[opened.name] = opened
        machine, agent, address = self._machine, self._agent, f"http://{HOST}:{self.port}"
        values = {"query": task.query, "task_id": task.task_id, "base_url": f"{address}/v1", "folder": str(folder)}
        given = variables_of(agent.environment, folder.parent, address, opened.name)
        limits = machine.episode_deadline_s, MOST_OUTPUT, agent.sandbox
        try:
            code, cut, output = await run_command(arguments_of(agent.command, values), folder, given, *limits)
        finally:
            opened.ended = True  # later calls are refused; those in flight may end
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    while opened.at_work:
                        await asyncio.sleep(LOOK_S)
            del self._open[opened.name]
        whole, calls = msgspec.structs.replace(task, gold=agent.golds.get(task.task_id)), tuple(opened.calls)
        seen: dict[str, Any] = {"calls": calls, "output": output, "exit_code": code, "cut": cut}
        return AgentSession(name=opened.name, task=whole, folder=folder, **seen)

    async def _score(self, played: Played) -> Episode:
        if isinstance(played, Episode):
            return played
        job, session, stack = played
        async with stack:
            try:
                reward = await asyncio.to_thread(self._agent.judge.rate, session)
            except InfrastructureFault as fault:
                return job.broken(self._agent.hashes, f"evaluation: {fault}")
        return episode_of(job, session, reward, self._agent.hashes)


@asynccontextmanager
async def agent_rollouts(
    agent: Agent, upstream: OnPolicyUpstream, record: Path, config: Config, publish: Publish
) -> AsyncIterator[AgentRollouts]:
    """Open the rollouts of an agent, and the proxy that records its calls of the model; raise as `recording`."""
    with recording(record, upstream.inputs) as recorder, sessions_folder() as folders, closing(agent.judge):
        rollouts = AgentRollouts(agent, folders, config, publish, recorder.append)
        service = ProxyService(upstream, rollouts.append, proxy_limits(config), admit=rollouts.admit)
        async with answering(service.app, service.limits, HOST, 0) as rollouts.port:
            yield rollouts


def open_agent_training(
    config: Config,
    inputs: TrainingInputs,
    out: Path,
    policy: LanguageModelPolicy,
    command: str,
    evaluation: str,
    environment: Mapping[str, str],
    sandbox: Sandbox,
) -> tuple[Training, OpenRollouts]:
    """Open a training run on the sessions of an agent (`command` and what follows it as in `Agent`) with the tasks of
    datasets. Raise UsageError if the evaluation (`MODULE:FUNCTION` or `FILE.py:FUNCTION`) or the tasks cannot be
    opened, two tasks have one id, or the settings do not fit."""
    arguments_of(command, {})
    if config.machine.fleet.workers or config.train.watch.metric != "reward":
        raise UsageError("agents have rewards alone: set machine.fleet.workers=0 and train.watch.metric=reward")
    choice, (setup, *_) = open_tasks(config, inputs, lambda *_: "")
    chosen = [placed.task for placed in (*choice.tasks, *choice.held_out)]
    golds = {task.task_id: task.gold for task in chosen}
    if len(golds) < len(chosen):
        raise UsageError("two tasks of the datasets have the same id: train on one dataset at a time")
    known = {"command": command, "evaluate": identity(evaluation)}
    hashes = Hashes(env=digest(known), policy=policy.hash, index="")
    judge = Judge(evaluation, config.machine.episode_deadline_s)
    agent = Agent(command, judge, golds, hashes, environment, sandbox)
    upstream = OnPolicyUpstream(inputs.model, policy.model, policy.counter, config)

    def without_gold(placed: Sequence[PlacedTask]) -> list[PlacedTask]:
        """The metrics of our environment say nothing about an agent."""
        return [PlacedTask(each.task.public()) for each in placed]

    bare = choice._replace(tasks=without_gold(choice.tasks), held_out=without_gold(choice.held_out))
    work = training_on(bare, [setup], inputs, out, played_with=known)
    publish = partial(publish_to, policy.model, base=work.base, versions=out / WEIGHTS)
    return work, agent_rollouts(agent, upstream, out / SESSIONS, config, publish)
