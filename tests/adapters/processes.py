"""The command as a process, for tests in environments of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def harness1(*words: str) -> str:
    ended = subprocess.run([sys.executable, "-m", "harness1", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def scratch_index(folder: Path) -> Path:
    """Index a small synthetic world."""
    harness1("index", "world:120", "--out", str(folder / "index"))
    return folder / "index"


@contextmanager
def serving_openenv(index: str, *more: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "openenv", "--data", "world:120", "--index", index, "--port", str(port), *more]
    with subprocess.Popen([sys.executable, "-m", "harness1", *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            for _ in range(300):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)
