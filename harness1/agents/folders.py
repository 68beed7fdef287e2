"""The folders of agents: a new one for each attempt, as what an earlier one left behind may still write in its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from harness1.errors import InfrastructureFault
from harness1.records import Task

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


def remove(folder: Path) -> None:
    """Remove a folder, or what can be removed of it: somebody may still write there."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def removed_at_end(folder: Path) -> Iterator[Path]:
    """Remove a folder at the end, whatever is in it then."""
    try:
        yield folder
    finally:
        remove(folder)
