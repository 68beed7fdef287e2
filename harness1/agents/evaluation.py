"""Score the sessions of agents by a function that the user names."""

from __future__ import annotations

import asyncio
import errno
import importlib
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness1.config import Agents
from harness1.episodes.jobs import EpisodeJob
from harness1.errors import InfrastructureFault, UsageError
from harness1.hashing import digest
from harness1.plugins import is_own, load_own
from harness1.records import (
    Episode,
    Hashes,
    ModelCall,
    Record,
    RewardRecord,
    RewardTerm,
    Sampling,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
)
from harness1.rows.proxy_record import RecordedCall
from harness1.serve.service import Refused

DELIVERED = "delivered.txt"
"""The file in which an agent names the documents that it delivers, an id on each line."""
Cut = Literal["", "deadline", "output"]


class AgentSession(Record, kw_only=True):
    """One run of an agent, as it is scored: its task with the gold, its calls, and what it left behind."""

    name: str
    task: Task
    folder: Path
    """The agent's working folder, which is deleted once the session is scored."""
    calls: tuple[RecordedCall, ...] = ()
    """In the order in which they were answered, refused ones included."""
    output: str = ""
    """The end of what it wrote to standard output and standard error."""
    exit_code: int = 0
    """Negative: the signal that ended it."""
    cut: Cut = ""
    """Why it was ended from outside, if it was: it ran for too long, or wrote too much."""


Evaluate = Callable[[AgentSession], float | Mapping[str, float]]
"""Returns the reward of a session, or its terms by name, which are added up. It runs in a thread."""


def open_evaluation(name: str) -> Evaluate:
    """Return the function that `MODULE:FUNCTION` or `FILE.py:FUNCTION` names.

    Raises:
        UsageError: there is no such module, file or function.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UsageError(f"--evaluate {name}: give MODULE:FUNCTION or FILE.py:FUNCTION")
    if is_own(name):
        found = load_own(name)
    else:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        try:
            found = getattr(importlib.import_module(place), function, None)
        except ImportError as error:
            raise UsageError(f"--evaluate {place} cannot be opened: {error}") from error
    if not callable(found):
        raise UsageError(f"--evaluate {name}: {place} has no function {function}")
    evaluate: Evaluate = found
    return evaluate


def reward_of(evaluate: Evaluate, session: AgentSession) -> RewardRecord:
    """Return the reward of a session.

    Raises:
        UsageError: the function returns something else than finite numbers.
        Exception: from the function; an InfrastructureFault leaves the session out of training.
    """
    given: Any = evaluate(session)
    terms = given if isinstance(given, Mapping) else {"reward": given}
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in terms.values()):
        raise UsageError(f"the evaluation of task {session.task.task_id} returned {given!r}: give finite numbers")
    return RewardRecord(
        float(sum(terms.values())), {name: RewardTerm(float(value), 1.0) for name, value in terms.items()}
    )


def delivered_f1(session: AgentSession) -> float:
    """Return F1 of the documents that the agent named in `delivered.txt`, against the gold; 0 if it named none."""
    path = session.folder / DELIVERED
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    named = {line.strip() for line in lines} - {""}
    gold = session.task.gold
    wanted = {doc_id for doc_id, grade in gold.relevant.items() if grade > 0} if gold is not None else set()
    right = len(named & wanted)
    return 2 * right / (len(named) + len(wanted)) if right else 0.0


SETTLE_S = 5.0
"""Seconds that the calls of an ended agent have to end."""
LOOK_S = 0.01
GROUPS = 3
"""Groups of six digits in the name of a session: it is all that keeps agents apart."""


@dataclass
class OpenSession:
    """What a session has called so far."""

    name: str
    calls: list[RecordedCall] = field(default_factory=list)
    begun: int = 0
    at_work: int = 0
    ended: bool = False


class Sessions:
    """Admits the calls of open sessions within their bounds, and collects them; `append` is that of a recorder.

    Args:
        keep: gets every call of an open session.
    """

    def __init__(self, keep: Callable[[RecordedCall], None], bounds: Agents) -> None:
        self._keep, self._bounds = keep, bounds
        self._open: dict[str, OpenSession] = {}

    def start(self) -> OpenSession:
        """Open a session under a name that an API key can carry and that nobody guesses."""
        name = "-".join(["session", *(f"{secrets.randbelow(10**6):06}" for _ in range(GROUPS))])
        self._open[name] = OpenSession(name)
        return self._open[name]

    async def end(self, session: OpenSession) -> tuple[RecordedCall, ...]:
        """Close a session; return its calls, after those in flight have ended. Later ones are refused."""
        session.ended = True
        waited = 0.0
        while session.at_work and waited < SETTLE_S:
            await asyncio.sleep(LOOK_S)
            waited += LOOK_S
        del self._open[session.name]
        return tuple(session.calls)

    @contextmanager
    def admit(self, name: str | None) -> Iterator[None]:
        """Let a call pass, or refuse it: of no open session, of a session with too many calls in all or at once."""
        session = self._open.get(name or "")
        if session is None or session.ended:
            raise Refused(410, "there is no open session of this name: the agent has ended, or gave another API key")
        if session.begun >= self._bounds.calls:
            raise Refused(429, f"a session has at most {self._bounds.calls} calls")
        if session.at_work >= self._bounds.at_once:
            raise Refused(429, f"a session has at most {self._bounds.at_once} calls at once")
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


KEPT_BYTES = 16 << 10
"""The end of an agent's output that is kept."""
GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""
DRAIN_S = 0.2
"""Seconds in which the rest of the output is read once the command has ended; others may hold the pipe for longer."""
READ_BYTES = 64 << 10
WRONG_COMMAND = frozenset((errno.ENOENT, errno.EACCES, errno.ENOEXEC))
"""Errors of a command that can never be started; all others are faults of this one start."""
NOT_AN_ARGUMENT = "the command cannot hold this task: leave out {query}, and let the agent read task.json"


@dataclass
class Ended:
    """How a command ended."""

    exit_code: int = 0
    cut: Cut = ""
    output: str = ""


@dataclass
class _Tail:
    """The end of a stream, and whether it became too long."""

    limit: int
    seen: int = 0
    kept: bytearray = field(default_factory=bytearray)

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read until the end of the stream, or until it is too long."""
        while self.seen <= self.limit and (data := await stream.read(READ_BYTES)):
            self.seen += len(data)
            self.kept += data
            del self.kept[:-KEPT_BYTES]


def arguments_of(command: str, values: Mapping[str, str]) -> list[str]:
    """Split a command as a shell does, and fill in `{name}` in each word; no shell sees the values.

    Raises:
        UsageError: the command is empty, or its quotes do not match.
    """
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
) -> Ended:
    """Run a command to its end, or end it: after a number of seconds, or of bytes that it wrote. Its children end with
    it, also if this is cancelled.

    Args:
        environment: all its environment variables.

    Raises:
        UsageError: there is no such command.
        InfrastructureFault: it could not be started this time, or its words are no arguments of a process.
    """
    # With a pipe of asyncio's, `wait` would also wait for whoever else holds its other end.
    theirs, stream, pipe = await _pipe()
    with closing(pipe):
        process = await _start(words, folder, environment, theirs)
        tail = _Tail(output_bytes)
        reading = asyncio.create_task(tail.read(stream))
        waiting = asyncio.create_task(process.wait())
        cut: Cut = ""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait({reading, waiting}, return_when="FIRST_COMPLETED")
                if tail.seen > output_bytes:
                    cut = "output"
                else:
                    await waiting
        except TimeoutError:
            cut = "deadline"
        finally:
            await _end(process, waiting)
            await asyncio.wait({reading}, timeout=DRAIN_S)
            reading.cancel()
    return Ended(process.returncode or 0, cut, bytes(tail.kept).decode(errors="replace"))


async def _pipe() -> tuple[int, asyncio.StreamReader, asyncio.ReadTransport]:
    """Return the file descriptor of a pipe that is written to, and its other end."""
    try:
        ours, theirs = os.pipe()
    except OSError as error:
        raise InfrastructureFault(f"the agent could not be started: {error.strerror}") from error
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(ours, "rb"))
    except BaseException:
        os.close(theirs)
        raise
    return theirs, stream, transport


async def _start(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], output: int
) -> asyncio.subprocess.Process:
    """Start a command, and close the file descriptor that it writes its output to."""
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            cwd=folder,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise _failure(error, words[0], folder) from error
    finally:
        os.close(output)


def _failure(error: OSError | ValueError, command: str, folder: Path) -> UsageError | InfrastructureFault:
    """Return what a failed start means: a wrong command, or a fault of this start alone."""
    if not isinstance(error, OSError):  # a NUL
        return InfrastructureFault(f"{NOT_AN_ARGUMENT} ({error})")
    if error.errno == errno.E2BIG:
        return InfrastructureFault(f"{NOT_AN_ARGUMENT} ({error.strerror})")
    if error.errno in WRONG_COMMAND and str(error.filename) != str(folder):
        return UsageError(f"--command {command} cannot be started: {error.strerror}")
    return InfrastructureFault(f"the agent could not be started: {error.strerror or error}")


async def _end(process: asyncio.subprocess.Process, waiting: asyncio.Task[int]) -> None:
    """End the process group: politely if the command still runs, then by force."""
    try:
        if not waiting.done():
            _signal(process.pid, signal.SIGTERM)
            await asyncio.wait({waiting}, timeout=GRACE_S)
    finally:  # also if this is cancelled
        _signal(process.pid, signal.SIGKILL)
    await asyncio.wait({waiting})


def _signal(group: int, which: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(group, which)


TASK = "task.json"
"""The file in an agent's folder that holds its task: `task_id` and `query`."""


def new_folder(within: Path | None = None) -> Path:
    """Make an empty folder, among temporary files or within another; raise InfrastructureFault if that fails."""
    try:
        return Path(tempfile.mkdtemp(prefix="harness1-agent-", dir=within))
    except OSError as error:
        raise InfrastructureFault(f"the folder of an agent cannot be made: {error}") from error


def write_task(task: Task, folder: Path) -> None:
    """Write a task for an agent to read; raise InfrastructureFault if that fails."""
    try:
        (folder / TASK).write_bytes(msgspec.json.encode({"task_id": task.task_id, "query": task.query}))
    except OSError as error:
        raise InfrastructureFault(f"the task of an agent cannot be written: {error}") from error


def remove_folder(folder: Path) -> None:
    """Remove a folder, or what can be removed of it: somebody may still write there."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def removing_folder(folder: Path) -> Iterator[Path]:
    """Remove a folder at the end, whatever is in it then."""
    try:
        yield folder
    finally:
        remove_folder(folder)


SAID = ToolCall("message")
"""The action of a call without a tool call: its text is the answer."""
BROKEN = frozenset((500, 502, 503, 504))
"""Statuses of calls that the infrastructure failed."""


def fault_of(session: AgentSession) -> str:
    """Return what the infrastructure did to a session; empty if nothing. A session without a single answered call says
    nothing about the policy, so it counts as broken too."""
    for call in session.calls:
        if call.status in BROKEN:
            return f"a call failed: {call.error}"
    if any(call.captured() for call in session.calls):
        return ""
    refused = next((call.error or call.untrainable for call in session.calls if call.error or call.untrainable), None)
    last = session.output.strip().rpartition("\n")[2][-200:]
    return f"the agent made no call that can be trained on (exit {session.exit_code}): {refused or last or 'no output'}"


def episode_of(job: EpisodeJob, session: AgentSession, reward: RewardRecord, hashes: Hashes) -> Episode:
    """Return the episode of a session that is not broken."""
    answered = [call for call in session.calls if call.captured() is not None]
    segments: dict[str, tuple[int, ...]] = {}
    prompts = _prompts(answered, segments)
    turns = [
        Turn(
            index=place,
            calls=(_call(call, prompt),),
            action=call.actions[0] if call.actions else SAID,
            ignored=call.actions[1:],
            prompt_tokens=len(call.prompt_ids),
        )
        for place, (call, prompt) in enumerate(zip(answered, prompts, strict=True), start=1)
    ]
    versions = [version for call in answered for version in (call.version_start, call.version_end)]
    return Episode(
        episode_id=digest([job.task.public(), job.sample_idx, job.seed, hashes, session.name])[:16],
        task=job.task.public(),
        sample_idx=job.sample_idx,
        group_id=job.group_id,
        seed=job.seed,
        turns=tuple(turns),
        stop_reason=StopReason.TURN_LIMIT if session.cut else StopReason.END_SEARCH,
        status=Status.COMPLETED,
        reward=reward,
        hashes=hashes,
        policy_versions=(min(versions), max(versions)),
        segments=segments,
    )


def _prompts(calls: Sequence[RecordedCall], segments: dict[str, tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Return the prompts as keys. One that continues an earlier prompt and its output stores what is new alone."""
    made: list[tuple[str, ...]] = []
    for place, call in enumerate(calls):
        keys: tuple[str, ...] = ()
        begin = 0
        for earlier in range(place - 1, -1, -1):
            before = (*calls[earlier].prompt_ids, *calls[earlier].output_ids)
            if call.prompt_ids[: len(before)] == before:
                keys, begin = (*made[earlier], f"call/{calls[earlier].call_id}"), len(before)
                break
        name = f"prompt/{call.call_id}"
        segments[name] = call.prompt_ids[begin:]
        made.append((*keys, name))
    return made


def _call(call: RecordedCall, prompt: tuple[str, ...]) -> ModelCall:
    return ModelCall(
        call_id=call.call_id,
        attempt=call.attempt,
        prompt=prompt,
        output_ids=call.output_ids,
        output_logprobs=call.output_logprobs or (),
        sampling=call.sampling or Sampling(),
        policy_version_start=call.version_start,
        policy_version_end=call.version_end,
        finish_reason=call.finish_reason,
        t_start=call.t_start,
        t_end=call.t_end,
    )
