"""The samples of each task in a run folder, so that a further episode gets a key of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from harness1.errors import MALFORMED, SchemaError
from harness1.runs.journal import EPISODES


class _Task(msgspec.Struct):
    task_id: str


class _Line(msgspec.Struct):
    """What is read of a recorded episode."""

    task: _Task
    sample_idx: int = 0


class Samples:
    """Counts the samples of each task. It reads each line of a folder once, however often it catches up."""

    def __init__(self) -> None:
        self._read = 0
        self._next: Counter[str] = Counter()

    def catch_up(self, folder: Path) -> None:
        """Read the lines that were added since the last time; call it while the folder is locked.

        Raises:
            SchemaError: a line is no episode.
        """
        path = folder / EPISODES
        size = path.stat().st_size if path.is_file() else 0
        if size < self._read:  # the run was made anew
            self._read, self._next = 0, Counter()
        if size == self._read:
            return
        with path.open("rb") as lines:
            lines.seek(self._read)
            for line in lines:
                self._count(line, path)
        self._read = size

    def next_of(self, task_id: str) -> int:
        """Return the number of the next sample of a task, from 0, and count it."""
        self._next[task_id] += 1
        return self._next[task_id] - 1

    def _count(self, line: bytes, path: Path) -> None:
        try:
            found = msgspec.json.decode(line, type=_Line)
        except MALFORMED as error:
            raise SchemaError(f"{path}: a line is no episode: {error}") from error
        self._next[found.task.task_id] = max(self._next[found.task.task_id], found.sample_idx + 1)
