"""Train the model behind an agent: start its command for each task, record its calls, and score what it did."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness1.agents.evaluation import AgentSession, Evaluate, episode_of, open_evaluation, reward_of
from harness1.agents.process import agent_folder, arguments_of, run_command
from harness1.config import Config
from harness1.data.leaks import open_filter
from harness1.data.open import from_anywhere, open_source
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, Jobs, OnEpisode, run_jobs
from harness1.errors import InfrastructureFault, UsageError
from harness1.http.client import Transient, retry
from harness1.models.fetch import resolve_model
from harness1.models.open import choose_device
from harness1.models.spec import ModelSpec
from harness1.plain import digest
from harness1.plugins import identity
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode, Gold, Hashes, Task
from harness1.rl.groups import PlacedTask
from harness1.rl.open import WEIGHTS, TrainingInputs, choose_tasks
from harness1.rl.rollouts import publish_to
from harness1.rl.train import OpenRollouts, Training
from harness1.rows.calls import RecordedCall, recording
from harness1.serve.chat import ChatRequest, Dialect, Recall
from harness1.serve.proxy import ProxyService, proxy_limits
from harness1.serve.server import answering
from harness1.serve.service import Refused
from harness1.serve.upstreams import Asked, TokenUpstream
from harness1.sft.collect import tasks_of_runs

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


HOST = "127.0.0.1"
SESSIONS = "sessions"
"""The record of all calls, below the folder of the training."""
SETTLE_S = 5.0
"""Seconds that the calls of an ended agent have to end."""
LOOK_S = 0.01
MOST_CALLS, MOST_AT_ONCE = 64, 8
"""Calls of a session to the model in all, and at the same time; further ones are refused."""
MOST_OUTPUT = 1 << 20
"""Bytes that an agent may write to standard output and standard error; one that writes more is ended."""
RETRIES = 2
"""Times that a session is begun anew after the infrastructure failed it."""
GROUPS = 3
"""Groups of six digits in the name of a session: it is all that keeps agents apart."""
Publish = Callable[["Weights", int], Awaitable[None]]


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


class Sessions:
    """Admits the calls of open sessions within their bounds, and collects them; `keep` gets every call, too."""

    def __init__(self, keep: Callable[[RecordedCall], None]) -> None:
        self._keep = keep
        self._open: dict[str, OpenSession] = {}

    def start(self) -> OpenSession:
        """Open a session under a name that an API key can carry and that nobody guesses."""
        name = "-".join(["session", *(f"{secrets.randbelow(10**6):06}" for _ in range(GROUPS))])
        self._open[name] = OpenSession(name)
        return self._open[name]

    async def end(self, session: OpenSession) -> tuple[RecordedCall, ...]:
        """Close a session; return its calls, after those in flight have ended. Later ones are refused."""
        session.ended = True
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while session.at_work:
                    await asyncio.sleep(LOOK_S)
        del self._open[session.name]
        return tuple(session.calls)

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
        """Keep a call; raise OSError if it cannot be written."""
        self._keep(call)
        if (session := self._open.get(call.session_id)) is not None:
            session.calls.append(call)


@dataclass(frozen=True)
class Agent:
    """An agent and its judge."""

    command: str
    """`{query}` and `{task_id}` stand for those of the task, `{base_url}` for the address of the model."""
    evaluate: Evaluate
    golds: Mapping[str, Gold | None]
    """By the ids of the tasks."""
    hashes: Hashes
    """Those of its episodes."""
    environment: Mapping[str, str]
    """The variables that it has beside those by which it finds the model."""


Played = tuple[EpisodeJob, AgentSession, ExitStack] | tuple[EpisodeJob, str, None]
"""A session whose folder the stack removes, or the fault that broke it."""


class AgentRollouts:
    """`Rollouts` of sessions: the command is carried out in a folder of its own, and what it did is scored."""

    def __init__(
        self, agent: Agent, sessions: Sessions, port: int, folders: Path, config: Config, publish: Publish
    ) -> None:
        self._agent, self._sessions, self._port, self._folders = agent, sessions, port, folders
        self._machine, self._publish = config.machine, publish

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        """Play all jobs, as `Rollouts.run`; raise UsageError if the command cannot be started, or the evaluation fails
        or returns no numbers."""
        await run_jobs(jobs, self._play, self._score, on_episode, self._machine.concurrency)

    async def publish(self, state: Weights, version: int) -> None:
        """As `Rollouts.publish`."""
        await self._publish(state, version)

    async def _play(self, job: EpisodeJob) -> Played:
        """Run the agent, and again in another folder while the infrastructure fails it."""

        async def once() -> Played:
            try:
                with ExitStack() as stack:
                    folder = stack.enter_context(agent_folder(self._folders, job.task))
                    session = await self._session(folder, job.task)
                    if fault := session.fault():
                        raise InfrastructureFault(fault)
                    return job, session, stack.pop_all()
            except InfrastructureFault as fault:
                raise Transient(str(fault)) from fault

        try:
            return await retry(once, 1 + RETRIES)
        except InfrastructureFault as fault:
            return job, str(fault), None

    async def _session(self, folder: Path, task: Task) -> AgentSession:
        machine, agent, opened = self._machine, self._agent, self._sessions.start()
        address = f"http://{HOST}:{self._port}"
        values = {"query": task.query, "task_id": task.task_id, "base_url": f"{address}/v1"}
        places = {"OPENAI_BASE_URL": f"{address}/v1", "ANTHROPIC_BASE_URL": address}
        given = {**agent.environment, **places, **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), opened.name)}
        try:
            words = arguments_of(agent.command, values)
            ended = await run_command(words, folder, given, machine.episode_deadline_s, MOST_OUTPUT)
        finally:
            calls = await self._sessions.end(opened)
        whole = msgspec.structs.replace(task, gold=agent.golds.get(task.task_id))
        return AgentSession(name=opened.name, task=whole, folder=folder, calls=calls, **ended._asdict())

    async def _score(self, played: Played) -> Episode:
        job, session, stack = played
        if stack is None or isinstance(session, str):
            return job.broken(self._agent.hashes, str(session))
        with stack:
            try:
                reward = await asyncio.to_thread(reward_of, self._agent.evaluate, session)
            except InfrastructureFault as fault:
                return job.broken(self._agent.hashes, f"evaluation: {fault}")
        return episode_of(job, session, reward, self._agent.hashes)


@asynccontextmanager
async def agent_rollouts(
    agent: Agent, upstream: OnPolicyUpstream, record: Path, config: Config, publish: Publish
) -> AsyncIterator[AgentRollouts]:
    """Open the rollouts of an agent, and the proxy that records its calls of the model. Raise UsageError as `recording`
    does, and InfrastructureFault if there is no room for the folders of the agents."""
    with recording(record, upstream.inputs) as recorder, agent_folder() as folders:
        sessions = Sessions(recorder.append)
        service = ProxyService(upstream, sessions.append, proxy_limits(config), admit=sessions.admit)
        async with answering(service.app, service.limits, HOST, 0) as port:
            yield AgentRollouts(agent, sessions, port, folders, config, publish)


def open_agent_training(
    config: Config,
    inputs: TrainingInputs,
    out: Path,
    policy: LanguageModelPolicy,
    command: str,
    evaluation: str,
    environment: Mapping[str, str],
) -> tuple[Training, OpenRollouts]:
    """Open a training run on the sessions of an agent (`command` and `environment` as in `Agent`) with the tasks of
    datasets. Raise UsageError if the evaluation (`MODULE:FUNCTION` or `FILE.py:FUNCTION`) or the tasks cannot be
    opened, two tasks have one id, or the settings are those of episodes in the environment."""
    arguments_of(command, {})
    if config.machine.fleet.workers or config.train.watch.metric != "reward":
        raise UsageError("agents have rewards alone: set machine.fleet.workers=0 and train.watch.metric=reward")
    sources = [open_source(data) for data in inputs.data]
    taught = {(source.name, inputs.split) for source in sources}
    excluded = tasks_of_runs(inputs.exclude)
    sieve = open_filter(config.data, sources, taught, share=inputs.share, against=inputs.against, excluded=excluded)
    tasks, held_out, selections = choose_tasks(sources, inputs.split, [None] * len(sources), config, sieve)
    golds = {placed.task.task_id: placed.task.gold for placed in (*tasks, *held_out)}
    if len(golds) < len(tasks) + len(held_out):
        raise UsageError("two tasks of the datasets have the same id: train on one dataset at a time")
    base = resolve_model(ModelSpec.read(inputs.model).model)
    known = {"command": command, "evaluate": identity(evaluation)}
    hashes = Hashes(env=digest(known), policy=policy.hash, index="")
    agent = Agent(command, open_evaluation(evaluation), golds, hashes, environment)

    async def publish(state: Weights, version: int) -> None:
        await publish_to(policy.model, state, version, base, out / WEIGHTS)

    def without_gold(placed: Sequence[PlacedTask]) -> list[PlacedTask]:
        """The metrics of our environment say nothing about an agent."""
        return [msgspec.structs.replace(each, task=each.task.public(), setup=0) for each in placed]

    upstream = OnPolicyUpstream(inputs.model, policy.model, policy.counter, config)
    work = Training(
        tasks=without_gold(tasks),
        held_out=without_gold(held_out),
        setups=[EpisodeSetup(config, "", inputs.model)],
        base=base,
        out=out,
        config=config,
        device=config.machine.device or choose_device(),
        datasets=[from_anywhere(data) for data in inputs.data],
        split=inputs.split,
        selections=selections,
        played_with=known,
    )
    return work, agent_rollouts(agent, upstream, out / SESSIONS, config, publish)
