"""Train the model behind an agent: run its command for each task, in a folder of its own, within a deadline, with
bounded output and nothing left behind; record its calls, and score what it did."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import shlex
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness1.agents.evaluation import AgentSession, Cut, Evaluate, episode_of, open_evaluation, reward_of
from harness1.config import Config
from harness1.data.open import from_anywhere
from harness1.episodes.jobs import EpisodeJob, Jobs, OnEpisode, run_jobs
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
from harness1.rl.rollouts import Publish, publish_to
from harness1.rl.train import WEIGHTS, OpenRollouts, Training, TrainingInputs, open_tasks
from harness1.rows.calls import RecordedCall, recording
from harness1.serve.chat import ChatRequest, Dialect, Recall
from harness1.serve.proxy import ProxyService, proxy_limits
from harness1.serve.server import answering
from harness1.serve.service import Refused
from harness1.serve.upstreams import Asked, TokenUpstream

TASK = "task.json"  # the file in an agent's folder that holds its task: `task_id` and `query`
KEPT_BYTES = 16 << 10  # the end of an agent's output that is kept
GRACE_S = 2.0  # between SIGTERM and SIGKILL
DRAIN_S = 0.2
"""Seconds in which the rest of the output is read once the command has ended; others may hold the pipe for longer."""
READ_BYTES = 64 << 10
WRONG_COMMAND = frozenset((errno.ENOENT, errno.EACCES, errno.ENOEXEC))
"""Errors of a command that can never be started; all others are faults of this one start."""
NOT_AN_ARGUMENT = "the command cannot hold this task: leave out {query}, and let the agent read task.json"


@contextmanager
def agent_folder(within: Path | None = None, task: Task | None = None) -> Iterator[Path]:
    """Make a folder, among temporary files or within another, with a task for an agent to read; remove it at the end,
    whatever is in it then. Each attempt has its own, as what an earlier one left behind may still write in its own.
    Raise InfrastructureFault if there is no room for it."""
    with ExitStack() as stack:
        try:
            folder = Path(tempfile.mkdtemp(prefix="harness1-agent-", dir=within))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if task is not None:
                (folder / TASK).write_bytes(msgspec.json.encode({"task_id": task.task_id, "query": task.query}))
        except OSError as error:
            raise InfrastructureFault(f"the folder of an agent cannot be made: {error}") from error
        yield folder


def arguments_of(command: str, values: Mapping[str, str]) -> list[str]:
    """Split a command as a shell does, and fill in `{name}` in each word; no shell sees the values. Raise UsageError if
    the command is empty, or its quotes do not match."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--command {command}: {error}") from error
    if not words:
        raise UsageError("--command is empty")
    placeholder = re.compile("|".join(re.escape(f"{{{name}}}") for name in values) or r"(?!)")
    return [placeholder.sub(lambda found: values[found[0][1:-1]], word) for word in words]


async def run_command(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float, output_bytes: int
) -> tuple[int, Cut, str]:
    """Run a command, with these environment variables alone, to its end, or end it: after a number of seconds, or of
    bytes that it wrote. Its children end with it, also if this is cancelled. Return its exit code, why it was ended,
    and the end of its output. Raise UsageError if there is no such command, and InfrastructureFault if it could not be
    started this time, or its words are no arguments."""
    # With a pipe of asyncio's, `wait` would also wait for whoever else holds its other end.
    try:
        ours, theirs = os.pipe()
    except OSError as error:
        raise InfrastructureFault(f"the agent could not be started: {error.strerror}") from error
    stream, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(stream)
    try:
        pipe, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb"))
    except BaseException:
        os.close(theirs)
        raise
    with closing(pipe):
        process = await _start(words, folder, environment, theirs)
        kept, flooded = bytearray(), asyncio.Event()

        async def read() -> None:
            seen = 0
            while seen <= output_bytes and (block := await stream.read(READ_BYTES)):
                seen += len(block)
                kept[:] = (kept + block)[-KEPT_BYTES:]
            if seen > output_bytes:
                flooded.set()

        reading, waiting = asyncio.create_task(read()), asyncio.create_task(process.wait())
        cut: Cut = ""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait({reading, waiting}, return_when="FIRST_COMPLETED")
                if flooded.is_set():
                    cut = "output"
                else:
                    await waiting
        except TimeoutError:
            cut = "deadline"
        finally:
            await _end(process, waiting)
            await asyncio.wait({reading}, timeout=DRAIN_S)
            reading.cancel()
    return process.returncode or 0, cut, bytes(kept).decode(errors="replace")


async def _start(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], output: int
) -> asyncio.subprocess.Process:
    """Start a command, and close the file descriptor of its output. A failed start is a mistake of the user only if the
    command is at fault."""
    pipes: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stdout": output, "stderr": asyncio.subprocess.STDOUT}
    try:
        given = dict(environment)
        return await asyncio.create_subprocess_exec(*words, cwd=folder, env=given, **pipes, start_new_session=True)
    except ValueError as error:  # a NUL
        raise InfrastructureFault(f"{NOT_AN_ARGUMENT} ({error})") from error
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise InfrastructureFault(f"{NOT_AN_ARGUMENT} ({error.strerror})") from error
        if error.errno in WRONG_COMMAND and str(error.filename) != str(folder):
            raise UsageError(f"--command {words[0]} cannot be started: {error.strerror}") from error
        raise InfrastructureFault(f"the agent could not be started: {error.strerror or error}") from error
    finally:
        os.close(output)


async def _end(process: asyncio.subprocess.Process, waiting: asyncio.Task[int]) -> None:
    """End the process group: politely if the command still runs, then by force."""
    ended = suppress(ProcessLookupError, PermissionError)
    try:
        if not waiting.done():
            with ended:
                os.killpg(process.pid, signal.SIGTERM)
            await asyncio.wait({waiting}, timeout=GRACE_S)
    finally:  # also if this is cancelled
        with ended:
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait({waiting})


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

    command: str  # `{query}`, `{task_id}`: those of the task; `{base_url}`: the address of the model
    evaluate: Evaluate
    golds: Mapping[str, Gold | None]  # by the ids of the tasks
    hashes: Hashes  # those of its episodes
    environment: Mapping[str, str]  # the variables that it has beside those by which it finds the model


Played = tuple[EpisodeJob, AgentSession, ExitStack] | Episode
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
        """Play all jobs, as `Rollouts.run`; UsageError if the command cannot be started, or the evaluation returns no
        numbers."""
        await run_jobs(jobs, self._play, self._score, on_episode, self._machine.concurrency)

    async def _play(self, job: EpisodeJob) -> Played:
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
            return job.broken(self._agent.hashes, str(fault))

    async def _session(self, folder: Path, task: Task) -> AgentSession:
        # An API key can carry the name, and nobody guesses it.
        opened = OpenSession("-".join(["session", *(f"{secrets.randbelow(10**6):06}" for _ in range(GROUPS))]))
        self._open[opened.name] = opened
        machine, agent, address = self._machine, self._agent, f"http://{HOST}:{self.port}"
        values = {"query": task.query, "task_id": task.task_id, "base_url": f"{address}/v1"}
        places = {"OPENAI_BASE_URL": f"{address}/v1", "ANTHROPIC_BASE_URL": address}
        given = {**agent.environment, **places, **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), opened.name)}
        try:
            words = arguments_of(agent.command, values)
            code, cut, output = await run_command(words, folder, given, machine.episode_deadline_s, MOST_OUTPUT)
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
    """Open the rollouts of an agent, and the proxy that records its calls of the model; raise as `recording`."""
    with recording(record, upstream.inputs) as recorder, agent_folder() as folders:
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
) -> tuple[Training, OpenRollouts]:
    """Open a training run on the sessions of an agent (`command` and `environment` as in `Agent`) with the tasks of
    datasets. Raise UsageError if the evaluation (`MODULE:FUNCTION` or `FILE.py:FUNCTION`) or the tasks cannot be
    opened, two tasks have one id, or the settings do not fit."""
    arguments_of(command, {})
    if config.machine.fleet.workers or config.train.watch.metric != "reward":
        raise UsageError("agents have rewards alone: set machine.fleet.workers=0 and train.watch.metric=reward")
    (tasks, held_out, selections), (setup, *_) = open_tasks(config, inputs, lambda *_: "")
    golds = {placed.task.task_id: placed.task.gold for placed in (*tasks, *held_out)}
    if len(golds) < len(tasks) + len(held_out):
        raise UsageError("two tasks of the datasets have the same id: train on one dataset at a time")
    base = resolve_model(ModelSpec.read(inputs.model).model)
    known = {"command": command, "evaluate": identity(evaluation)}
    hashes = Hashes(env=digest(known), policy=policy.hash, index="")
    agent = Agent(command, open_evaluation(evaluation), golds, hashes, environment)
    publish = partial(publish_to, policy.model, base=base, versions=out / WEIGHTS)

    def without_gold(placed: Sequence[PlacedTask]) -> list[PlacedTask]:
        """The metrics of our environment say nothing about an agent."""
        return [PlacedTask(each.task.public()) for each in placed]

    upstream = OnPolicyUpstream(inputs.model, policy.model, policy.counter, config)
    work = Training(
        tasks=without_gold(tasks),
        held_out=without_gold(held_out),
        setups=[setup],
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
