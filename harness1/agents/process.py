"""Run an agent's command: in a folder of its own, within a deadline, with bounded output, and nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness1.agents.evaluation import Cut
from harness1.errors import InfrastructureFault, UsageError

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
