"""Files made from a run's episodes for people and other programs: tables, TREC runs, a BrowseComp-Plus submission.
Equal episodes give equal bytes, in whatever order they finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness1.config import Config
from harness1.data.trec import write_qrels, write_run
from harness1.eval.csv_table import csv_table
from harness1.eval.failure import Faults
from harness1.eval.metrics import shown_documents
from harness1.eval.resources import resources
from harness1.eval.summary import task_metrics
from harness1.hashing import text_digest
from harness1.records import ChunkId, DocId, Episode, Status, Task, UnitId
from harness1.reward.measures import delivered
from harness1.runs.files import write_atomically, write_json
from harness1.runs.folder import (
    CONFIG,
    CURATED,
    ENCODED_QRELS,
    METRICS,
    POOL,
    PROVENANCE,
    RESOURCES,
    SUBMISSION,
    TASKS,
    of_sample,
    read_provenance,
    shown_config,
    toml_lines,
    wall_seconds,
)

TAG = "harness1"
"""The last column of a TREC run."""
OFFICIAL = {"search_corpus": "search", "fan_out_search": "search", "read_document": "get_document"}
"""BrowseComp-Plus's names of the tools that it also has."""
LONGEST_NAME = 150
"""Characters of a task id in a file name; file systems allow 255 in all."""

Units = Callable[[Episode], Sequence[UnitId]]


def output_names(task_ids: Sequence[str], samples: int) -> Iterator[str]:
    """Yield the paths, within its folder, of all files made from a run's episodes except the report."""
    yield from (METRICS, RESOURCES, TASKS, CONFIG, PROVENANCE)
    for sample in range(samples):
        yield from (of_sample(CURATED, sample), of_sample(POOL, sample))
        yield from (f"{of_sample(SUBMISSION, sample)}/{submission_name(task_id)}" for task_id in task_ids)


def write_outputs(
    out: Path, episodes: Sequence[Episode], tasks: Mapping[str, Task], config: Config, metrics: Mapping[str, Any]
) -> bool:
    """Write all files except the provenance and the report; return whether ids had to be encoded in the TREC runs.

    Args:
        episodes: the last one of each task and sample, in their order.
        metrics: the content of `metrics.json`.
    """
    write_json(out / METRICS, metrics)
    write_json(out / RESOURCES, resources(episodes, config, wall_seconds(read_provenance(out))))
    write_atomically(out / TASKS, task_table(episodes, tasks, config, faults=metrics["faults"]).encode())
    settings = "\n".join(toml_lines(shown_config(config))).strip()
    write_atomically(out / CONFIG, f"{settings}\n".encode())
    by_sample: dict[int, list[Episode]] = {}
    for episode in episodes:
        by_sample.setdefault(episode.sample_idx, []).append(episode)
    encode = any(map(_is_broken, _ids(episodes)))
    for sample, of_one in by_sample.items():
        _write_run(out / of_sample(CURATED, sample), of_one, delivered, encode)
        _write_run(out / of_sample(POOL, sample), of_one, surfaced, encode)
        folder = out / of_sample(SUBMISSION, sample)
        folder.mkdir(exist_ok=True)
        for episode in of_one:
            write_json(folder / submission_name(episode.task.task_id), submission(episode))
    (out / ENCODED_QRELS).unlink(missing_ok=True)
    if encode:
        write_qrels(out / ENCODED_QRELS, _judgements(tasks))
    return encode


def _judgements(tasks: Mapping[str, Task]) -> dict[str, dict[DocId, int]]:
    """Return the relevant documents of each task, their ids encoded as in the runs."""
    golds = {task_id: task.gold.relevant for task_id, task in sorted(tasks.items()) if task.gold}
    return {
        _encoded(task_id): {DocId(_encoded(name)): grade for name, grade in found.items()}
        for task_id, found in golds.items()
    }


def task_table(
    episodes: Sequence[Episode],
    tasks: Mapping[str, Task],
    config: Config,
    measured: Callable[[str, dict[str, float]], Mapping[str, float]] = lambda _task_id, metrics: metrics,
    faults: Faults = "exclude",
) -> str:
    """Return a table (`csv_table`) with a line for each task: its id, its query, the number of its scored samples, and
    the mean of each metric over these; cells are empty where there is none.

    Args:
        measured: returns the metrics to show of a task, given its id and those of its episodes.
        faults: as in `summarise`.
    """
    found = task_metrics(episodes, tasks, config, finished=True, faults=faults)
    rows = {task_id: measured(task_id, metrics) for task_id, metrics in found.items()}
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    scored = Counter(
        each.task.task_id for each in episodes if faults == "zero" or each.status is not Status.INFRA_ERROR
    )
    lines = (
        (task_id, tasks[task_id].query, scored[task_id], *(rows.get(task_id, {}).get(name, "") for name in names))
        for task_id in sorted(tasks)
    )
    return csv_table(("task_id", "query", "samples", *names), lines)


def surfaced(episode: Episode) -> tuple[UnitId, ...]:
    """Return everything that was seen: the pool in the order of discovery, then its near duplicates."""
    return tuple(dict.fromkeys((*episode.pool, *episode.aliases)))


def submission(episode: Episode) -> dict[str, Any]:
    """Return what BrowseComp-Plus evaluates for one query (`scripts_evaluation/evaluate_run.py`): the documents that
    the tools returned, calls of each tool, and an answer, which a search agent leaves empty. A failure counts as
    incomplete."""
    failed = episode.status in (Status.POLICY_ERROR, Status.INFRA_ERROR)
    actions = [turn.action.name for turn in episode.turns if turn.action is not None]
    calls = Counter(OFFICIAL.get(name, name) for name in actions if name != "end_search")
    return {
        "query_id": episode.task.task_id,
        "tool_call_counts": dict(sorted(calls.items())),
        "status": "incomplete" if failed else "completed",
        "retrieved_docids": list(dict.fromkeys(_documents(episode, surfaced(episode)))),
        "result": [{"type": "output_text", "output": ""}],
    }


def submission_name(task_id: str) -> str:
    """Return the file name of one query, for any id."""
    name = quote(task_id, safe="")
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}-{text_digest(task_id)}"
    return f"run_{name}.json"


def _documents(episode: Episode, units: Iterable[UnitId]) -> Iterator[str]:
    """Yield one document for each unit: a document itself, or the document of a chunk. For a chunk that was never
    shown, the document is the part of its id before the number (see `chunking.chunk`)."""
    shown = shown_documents(episode)
    for unit in units:
        yield unit if episode.unit == "document" else shown.get(ChunkId(unit), unit.rpartition("#")[0] or unit)


def _write_run(path: Path, episodes: Iterable[Episode], units: Units, encode: bool) -> None:
    """Write a TREC run with scores that fall from the number of units to 1, leaving out infrastructure faults."""
    column = _encoded if encode else str
    ranked = ((episode, units(episode)) for episode in episodes if episode.status is not Status.INFRA_ERROR)
    run = [
        (
            column(episode.task.task_id),
            [(UnitId(column(unit)), float(len(found) - place)) for place, unit in enumerate(found)],
        )
        for episode, found in ranked
    ]
    write_run(path, run, TAG)


def _ids(episodes: Iterable[Episode]) -> Iterator[str]:
    for episode in episodes:
        yield episode.task.task_id
        yield from delivered(episode)
        yield from surfaced(episode)


def _is_broken(name: str) -> bool:
    """Return whether an id would break the columns of a TREC file."""
    return name.split() != [name]


def _encoded(name: str) -> str:
    """Return an id as one column: white space and percent signs are percent-encoded, so that ids stay distinct."""
    return "".join(quote(each) if each.isspace() or each == "%" else each for each in name) or "%"
