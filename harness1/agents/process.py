"""Run the command of an agent in folders of its own, within a deadline, with bounded output and nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import secrets
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec

from harness1.agents import keeper
from harness1.agents.evaluation import Cut
from harness1.agents.sandbox import HOME, TEMPORARY, WAYS, WORK, Sandbox, is_possible
from harness1.errors import InfrastructureFault, UsageError
from harness1.records import Task

TASK = "task.json"  # the file in an agent's folder that holds its task: `task_id` and `query`
KEPT_BYTES = 16 << 10  # the end of an agent's output that is kept
DRAIN_S = 0.2
"""Seconds in which the rest of the output is read once the command has ended; others may hold the pipe for longer."""
STUCK_S = keeper.GRACE_S + keeper.MOST_END_S + 5.0
READ_BYTES = 64 << 10
PROBE_S, PROBED = 20.0, 7
PROBE = ("/bin/sh", "-c", f"test -w . && exit {PROBED}")
WRONG_COMMAND = frozenset((errno.ENOENT, errno.EACCES, errno.ENOEXEC))
"""Errors of a command that can never be started; all others are faults of this one start."""
NOT_AN_ARGUMENT = "the command cannot hold this task: leave out {query}, and let the agent read task.json"


@contextmanager
def sessions_folder() -> Iterator[Path]:
    """Make a folder for the trees of agents among temporary files, which others may enter, but not list. Raise
    InfrastructureFault if there is no room for it."""
    with ExitStack() as stack:
        try:
            folder = Path(tempfile.mkdtemp(prefix="harness1-agents-", dir=None))
            stack.callback(remove, folder)
            folder.chmod(0o711)
        except OSError as error:
            raise InfrastructureFault(f"the folder of agents cannot be made: {error}") from error
        yield folder


@asynccontextmanager
async def agent_folder(within: Path, task: Task) -> AsyncIterator[Path]:
    """Make a tree of folders that its owner alone may enter, and yield its working folder, with a task for an agent to
    read; remove the tree at the end, whatever is in it then. Each attempt has its own, as what an earlier one left
    behind may still write in its own. Raise InfrastructureFault if there is no room for it."""
    tree: Path | None = None
    try:
        try:
            tree = Path(tempfile.mkdtemp(prefix="agent-", dir=within))
            for name in (WORK, HOME, TEMPORARY):
                (tree / name).mkdir(0o700)
            (tree / WORK / TASK).write_bytes(msgspec.json.encode({"task_id": task.task_id, "query": task.query}))
        except OSError as error:
            raise InfrastructureFault(f"the folder of an agent cannot be made: {error}") from error
        yield tree / WORK
    finally:
        if tree is not None:
            await asyncio.to_thread(remove, tree)  # an agent may have made very many files


def remove(folder: Path) -> None:
    """Remove a folder, however deep it is and whatever its modes are: folders within are first moved to its top."""
    folders, names, unknown = [folder], count(), secrets.token_hex(8)  # an agent may have taken names that it can guess
    for place in folders:
        with suppress(OSError):
            place.chmod(0o700)
            for entry in [*os.scandir(place)]:
                path = Path(entry.path)
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        path.chmod(0o700)
                        folders.append(path.rename(folder / f".removed-{unknown}-{next(names)}"))
                    else:
                        path.unlink()
    for place in reversed(folders):
        with suppress(OSError):
            place.rmdir()


def keep_plain(folder: Path) -> None:
    """Open the folders above again, which an agent may have closed to its own user, and make an empty folder where it
    put something else in place of its own, such as a link to that of another."""
    for above, mode in ((folder.parent.parent, 0o711), (folder.parent, 0o700)):
        with suppress(OSError):
            above.chmod(mode)
    with suppress(OSError):
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)
            folder.mkdir(0o700)


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


async def find_sandbox(closed: Iterable[str] = (), needed: Iterable[str] = ()) -> Sandbox:
    """Return the best sandbox that this machine permits, as tried; `closed` and `needed` as in `Sandbox`. Raise
    InfrastructureFault if there is no room for the trial."""
    with sessions_folder() as folders:
        for way in filter(is_possible, WAYS):
            sandbox = msgspec.structs.replace(way, closed=tuple(closed), needed=tuple(needed))
            with suppress(InfrastructureFault, UsageError):
                async with agent_folder(folders, Task("", "", "")) as folder:
                    code, *_ = await run_command(PROBE, folder, {}, PROBE_S, KEPT_BYTES, sandbox)
                if code == PROBED:
                    return sandbox
    return WAYS[-1]


async def run_command(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    seconds: float,
    output_bytes: int,
    sandbox: Sandbox,
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
    with closing(pipe), ExitStack() as stack:
        process, status = await _start(sandbox, words, folder, environment, theirs, stack)
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
        code, full = _read_end(status, words, folder, process.returncode or 0)
    keep_plain(folder)
    return code, cut or ("disk" if full else ""), bytes(kept).decode(errors="replace")


async def _start(
    sandbox: Sandbox, words: Sequence[str], folder: Path, environment: Mapping[str, str], output: int, stack: ExitStack
) -> tuple[asyncio.subprocess.Process, IO[bytes]]:
    """Start the keeper of a command, and close the file descriptor of its output. Return it with the file in which it
    says how the command ended."""
    try:
        order, status = (stack.enter_context(closing(TemporaryFile())) for _ in range(2))  # noqa: SIM115
        order.write(json.dumps(sandbox.order(words, folder)).encode())
        order.seek(0)
        pipes: dict[str, Any] = {"stdin": order, "stdout": output, "stderr": asyncio.subprocess.STDOUT}
        # Not in this environment: an interpreter is moved by variables, and an agent's may be any.
        started = [sys.executable, "-I", "-S", keeper.__file__, str(status.fileno())]
        pipes |= {"cwd": folder, "env": dict(environment), "pass_fds": (status.fileno(),), "start_new_session": True}
        return await asyncio.create_subprocess_exec(*started, **pipes), status
    except OSError as error:
        raise InfrastructureFault(f"the agent could not be started: {error.strerror or error}") from error
    finally:
        os.close(output)


def _read_end(status: IO[bytes], words: Sequence[str], folder: Path, returned: int) -> tuple[int, bool]:
    """Return the exit code of a command, and whether it filled the disk, as its keeper says. A failed start is a
    mistake of the user only if the command is at fault."""
    status.seek(0)
    for said in map(json.loads, status.read().splitlines()):
        if refused := said.get("refused"):
            raise InfrastructureFault(f"the agent could not be kept apart: {refused}")
        if "errno" in said:
            number, why = said["errno"], said["why"]
            if number in (0, errno.E2BIG):
                raise InfrastructureFault(f"{NOT_AN_ARGUMENT} ({os.strerror(number) if number else why})")
            if number in WRONG_COMMAND and said["file"] != str(folder):
                raise UsageError(f"--command {words[0]} cannot be started: {os.strerror(number)}")
            raise InfrastructureFault(f"the agent could not be started: {why}")
        return said["code"], said["full"]
    return returned, False


async def _end(process: asyncio.subprocess.Process, waiting: asyncio.Task[int]) -> None:
    """Have the keeper end the command and all that it started: politely if it still runs, then by force."""
    try:
        if not waiting.done():
            with suppress(ProcessLookupError):
                process.terminate()
            await asyncio.wait({waiting}, timeout=STUCK_S)
    finally:  # also if this is cancelled
        if not waiting.done():
            with suppress(ProcessLookupError):
                process.terminate()
    await asyncio.wait({waiting}, timeout=STUCK_S)
    if not waiting.done():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait({waiting})
