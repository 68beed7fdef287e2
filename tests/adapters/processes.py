"""The command as a process, for tests in environments of their own."""

from __future__ import annotations

import subprocess
import sys
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
    """The address of a server on a port of the system's choice, which it announces."""
    words = ["serve", "openenv", "--data", "world:120", "--index", index, "--port", "0", *more]
    with subprocess.Popen([sys.executable, "-m", "harness1", *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().removeprefix("OpenEnv at ").partition(",")[0]
        finally:
            process.terminate()
            assert process.wait(20) == 0
