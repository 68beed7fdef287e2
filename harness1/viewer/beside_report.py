"""`view.html` beside the report of an evaluation: the episodes to which the report links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness1.records import Task
from harness1.runs.folder import VIEW
from harness1.viewer.report import read_report
from harness1.viewer.write import Asked, write_view


def ensure_view(folder: Path, tasks: Sequence[Task], max_bytes: int) -> None:
    """Write the viewer file of a run folder, unless it exists: all episodes are listed, and those of the worst and the
    best tasks can be opened. Replaying all of them would take as long as the evaluation.

    An existing file is up to date, because commands that change the episodes of a run remove it.

    Raises:
        UsageError: the folder is not a run folder, or the file cannot be written.
        SchemaError: one of its files is damaged.
    """
    if (folder / VIEW).is_file():
        return
    worst, best = read_report(folder, tasks).worst_and_best
    if worst:
        write_view(Asked([folder], tasks=[*worst, *best], max_bytes=max_bytes, workers=1), folder / VIEW)
