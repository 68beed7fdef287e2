"""The command as a process, for tests in environments of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def harness1(*words: str) -> str:
    ended = subprocess.run([sys.executable, "-m", "harness1", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def scratch_index(folder: Path) -> Path:
    """Index a small synthetic world."""
    harness1("index", "world:120", "--out", str(folder / "index"))
    return folder / "index"
