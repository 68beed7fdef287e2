"""What a report is made of: the files of a run folder, as far as they are there."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import SchemaError, UsageError
from harness1.eval.ablations.table import AblationTable
from harness1.eval.outputs import task_id_of
from harness1.records import Task
from harness1.runs.folder import METRICS, PROVENANCE, RESOURCES, TASKS
from harness1.runs.journal import read_lines
from harness1.runs.stage import Stage, read_stage
from harness1.runs.store import EPISODES

ABLATIONS = "ablations.json"


class _EpisodeHead(msgspec.Struct):
    """As much of an episode as a report names; the rest of the line is skipped."""

    episode_id: str
    task: Task
    sample_idx: int = 0


@dataclass(frozen=True)
class RunFiles:
    """Optional files that are not there are empty."""

    stage: Stage
    metrics: Mapping[str, Any]
    per_task: Mapping[str, Mapping[str, float]]
    """Metrics of each task, means over its samples."""
    queries: Mapping[str, str]
    episodes: Mapping[str, tuple[str, ...]]
    """The episode ids of each task, in order of the samples."""
    provenance: Mapping[str, Any]
    resources: Mapping[str, Any]
    ablations: AblationTable | None
    """Of the folder that this one lies in, where it holds some."""


def read_run_files(folder: Path) -> RunFiles:
    """Read a run folder as its files stand.

    Raises:
        UsageError: it is no run folder, or has no metrics yet.
        SchemaError: one of the files is not what it should be.
    """
    stage = read_stage(folder)
    if stage is None or stage.verb != "run":
        raise UsageError(f"{folder} is no run folder: it has no stage.json of a run")
    if not (folder / METRICS).is_file():
        raise UsageError(f"{folder} has no {METRICS}: it is made when an evaluation ends")
    queries, episodes = _heads(folder / EPISODES)
    per_task = _per_task(folder / TASKS)
    return RunFiles(
        stage,
        _json(folder / METRICS),
        per_task,
        queries,
        episodes,
        _json(folder / PROVENANCE),
        _json(folder / RESOURCES),
        _ablations(folder.resolve().parent / ABLATIONS),
    )


def _heads(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Queries and episode ids by task. Of an episode that was run again both lines have one id."""
    if not path.is_file():
        return {}, {}
    queries: dict[str, str] = {}
    found: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for number, line in read_lines(path):
        try:
            head = msgspec.json.decode(line, type=_EpisodeHead)
        except msgspec.MsgspecError as error:
            raise SchemaError(f"{path}:{number}: not an episode: {error}") from error
        queries[head.task.task_id] = head.task.query
        found[head.task.task_id][head.sample_idx] = head.episode_id
    return queries, {task: tuple(name for _, name in sorted(names.items())) for task, names in sorted(found.items())}


def _per_task(path: Path) -> dict[str, dict[str, float]]:
    """The numbers of the per-task table."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if any("task_id" not in row for row in rows):
        raise SchemaError(f"{path} has no column task_id")
    return {task_id_of(row["task_id"]): dict(_numbers(row)) for row in rows}


def _numbers(row: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name in row.keys() - {"task_id", "query"}:
        if name and (value := _number(row[name])) is not None:
            yield name, value


def _number(text: object) -> float | None:
    try:
        value = float(str(text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _json(path: Path) -> dict[str, Any]:
    """A file of JSON; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise SchemaError(f"{path}: {error}") from error


def _ablations(path: Path) -> AblationTable | None:
    """A file of that name beside the run that is something else is none of its business."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AblationTable)
    except (OSError, msgspec.MsgspecError):
        return None
