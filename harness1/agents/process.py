"""Run an agent's command: in a folder of its own, within a deadline, with bounded output, and nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness1.agents.evaluation import Cut
from harness1.errors import InfrastructureFault, UsageError
from harness1.records import Task

TASK = "task.json"
"""The file in an agent's folder that holds its task: `task_id` and `query`."""
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


class Ended(NamedTuple):
    """How a command ended."""

    exit_code: int
    cut: Cut
    output: str


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
) -> Ended:
    """Run a command, with these environment variables alone, to its end, or end it: after a number of seconds, or of
    bytes that it wrote. Its children end with it, also if this is cancelled. Raise UsageError if there is no such
    command, and InfrastructureFault if it could not be started this time, or its words are no arguments."""
    # With a pipe of asyncio's, `wait` would also wait for whoever else holds its other end.
    theirs, stream, pipe = await _open_pipe()
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
    return Ended(process.returncode or 0, cut, bytes(kept).decode(errors="replace"))


async def _open_pipe() -> tuple[int, asyncio.StreamReader, asyncio.ReadTransport]:
    try:
        ours, theirs = os.pipe()
    except OSError as error:
        raise InfrastructureFault(f"the agent could not be started: {error.strerror}") from error
    stream = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(stream)
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb"))
    except BaseException:
        os.close(theirs)
        raise
    return theirs, stream, transport


async def _start(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], output: int
) -> asyncio.subprocess.Process:
    """Start a command, and close the file descriptor of its output. A failed start is a mistake of the user only if the
    command is at fault."""
    pipes: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stdout": output, "stderr": asyncio.subprocess.STDOUT}
    try:
        return await asyncio.create_subprocess_exec(
            *words, cwd=folder, env=dict(environment), **pipes, start_new_session=True
        )
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
