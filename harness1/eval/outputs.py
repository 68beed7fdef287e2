"""Files made from a run's episodes: tables, TREC runs, a BrowseComp-Plus submission; equal episodes give equal bytes,
in whatever order they finished."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from harness1.config import Config
from harness1.data.trec import write_qrels, write_run
from harness1.eval.metrics import MeasuredRun, documents_of_hits, resources
from harness1.plain import text_digest
from harness1.records import ChunkId, DocId, Episode, Status, UnitId
from harness1.reward.measures import delivery
from harness1.runs import folder as runs
from harness1.runs.files import read_json, read_stage, write_atomically, write_json
from harness1.runs.journal import latest_episodes

TAG = "harness1"  # the last column of a TREC run
OFFICIAL = {"search_corpus": "search", "fan_out_search": "search", "read_document": "get_document"}
"""BrowseComp-Plus's names of the tools that it also has."""
LONGEST_NAME = 150  # characters of a task id in a file name; file systems allow 255 in all


def output_names(task_ids: Sequence[str], samples: int) -> Iterator[str]:
    """Yield the names of all files made from a run's episodes except the report."""
    yield from (runs.METRICS, runs.RESOURCES, runs.TASKS, runs.CONFIG, runs.PROVENANCE)
    for sample in range(samples):
        yield from (runs.of_sample(runs.CURATED, sample), runs.of_sample(runs.POOL, sample))
        yield from (f"{runs.of_sample(runs.SUBMISSION, sample)}/{submission_name(task_id)}" for task_id in task_ids)


def write_outputs(
    out: Path, episodes: Sequence[Episode], measured: MeasuredRun, config: Config, metrics: Mapping[str, Any]
) -> bool:
    """Write all files but the provenance and the report; return whether ids had to be encoded in the TREC runs."""
    write_json(out / runs.METRICS, metrics)
    write_json(out / runs.RESOURCES, resources(episodes, config, runs.wall_seconds(runs.read_provenance(out))))
    write_atomically(out / runs.TASKS, task_table(episodes, measured).encode())
    settings = "\n".join(runs.toml_lines(runs.public_config(config))).strip()
    write_atomically(out / runs.CONFIG, f"{settings}\n".encode())
    by_sample: dict[int, list[Episode]] = {}
    for episode in episodes:
        by_sample.setdefault(episode.sample_idx, []).append(episode)
    ids = (name for each in episodes for name in (each.task.task_id, *delivery(each), *seen_units(each)))
    encode = any(name.split() != [name] for name in ids)  # such an id would break the columns of a TREC file
    column = _encode if encode else str
    for sample, of_one in by_sample.items():
        for name, units_of in ((runs.CURATED, delivery), (runs.POOL, seen_units)):
            run = []
            for episode in (each for each in of_one if each.status is not Status.INFRA_ERROR):
                units = [UnitId(column(unit)) for unit in units_of(episode)]
                ranked = [(unit, float(len(units) - place)) for place, unit in enumerate(units)]
                run.append((column(episode.task.task_id), ranked))
            write_run(out / runs.of_sample(name, sample), run, TAG)
        folder = out / runs.of_sample(runs.SUBMISSION, sample)
        folder.mkdir(exist_ok=True)
        for episode in of_one:
            write_json(folder / submission_name(episode.task.task_id), submission(episode))
    (out / runs.ENCODED_QRELS).unlink(missing_ok=True)
    if encode:
        judged = {}
        for task_id, task in sorted(measured.tasks.items()):
            if task.gold:
                judged[_encode(task_id)] = {DocId(_encode(name)): grade for name, grade in task.gold.relevant.items()}
        write_qrels(out / runs.ENCODED_QRELS, judged)
    return encode


def task_table(episodes: Sequence[Episode], measured: MeasuredRun) -> str:
    """Return a table with the id, the query, the number of scored samples and the metrics of each task."""
    rows, tasks = measured.per_task(), measured.tasks
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    counted = (each for each in episodes if measured.counted == "zero" or each.status is not Status.INFRA_ERROR)
    scored = Counter(each.task.task_id for each in counted)
    lines = (
        (name, tasks[name].query, scored[name], *(rows.get(name, {}).get(metric, "") for metric in names))
        for name in sorted(tasks)
    )
    return csv_table(("task_id", "query", "samples", *names), lines)


def seen_units(episode: Episode) -> tuple[UnitId, ...]:
    """Return everything that was seen: the pool in the order of discovery, then its near duplicates."""
    return tuple(dict.fromkeys((*episode.pool, *episode.aliases)))


def submission(episode: Episode) -> dict[str, Any]:
    """Return what BrowseComp-Plus evaluates (`scripts_evaluation/evaluate_run.py`); the answer is empty."""
    failed = episode.status in (Status.POLICY_ERROR, Status.INFRA_ERROR)
    actions = [turn.action.name for turn in episode.turns if turn.action is not None]
    calls = Counter(OFFICIAL.get(name, name) for name in actions if name != "end_search")
    documents: list[str] = list(seen_units(episode))
    if episode.unit == "chunk":
        # For a chunk that was never shown, the part of its id before the number (see `chunking.chunk`).
        shown = documents_of_hits(episode)
        documents = [shown.get(ChunkId(unit), DocId(unit.rpartition("#")[0] or unit)) for unit in documents]
    return {
        "query_id": episode.task.task_id,
        "tool_call_counts": dict(sorted(calls.items())),
        "status": "incomplete" if failed else "completed",
        "retrieved_docids": list(dict.fromkeys(documents)),
        "result": [{"type": "output_text", "output": ""}],
    }


def submission_name(task_id: str) -> str:
    """Return the file name of one query, for any id."""
    name = quote(task_id, safe="")
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}-{text_digest(task_id)}"
    return f"run_{name}.json"


def _encode(name: str) -> str:
    """Return an id as one column: white space and percent signs are percent-encoded, so that ids stay distinct."""
    return "".join(quote(each) if each.isspace() or each == "%" else each for each in name) or "%"


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Prefixes of texts that a spreadsheet takes for formulas (OWASP, CSV injection), the last four in full width."""


def csv_table(columns: Sequence[str], rows: Iterable[Iterable[str | float]]) -> str:
    """Return comma-separated values (RFC 4180), in which what a spreadsheet would evaluate has an apostrophe."""

    def escape(cell: str | float) -> str | float:
        return f"'{cell}" if isinstance(cell, str) and cell.lstrip("' ").startswith(FORMULA) else cell

    text = io.StringIO(newline="")
    csv.writer(text).writerows(map(escape, row) for row in (columns, *rows))
    return text.getvalue()


class RecordedRun(NamedTuple):
    """A run folder read back: the last episode of each task and sample, in that order, and what `metrics.json` holds,
    if anything was scored."""

    folder: Path
    episodes: tuple[Episode, ...]
    metrics: dict[str, Any]


def load_run(folder: Path | str) -> RecordedRun:
    """Return a recorded run of `search`, `eval`, `sft collect` or `rl train`: its `folder`, its `episodes`, and its
    `metrics`, shares of 1 and other units as `harness1 eval` writes them.

    Raises:
        UsageError: the folder holds no run; or, as a SchemaError, its card or an episode is damaged.
    """
    place = Path(folder)
    card = read_stage(place)
    place = place / "episodes" if card is not None and card.verb == "rl train" else place
    runs.run_config(place)
    episodes = tuple(episode for _, episode in sorted(latest_episodes(place).items()))
    return RecordedRun(place, episodes, read_json(place / runs.METRICS) if (place / runs.METRICS).is_file() else {})
