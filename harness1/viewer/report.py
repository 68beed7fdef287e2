"""`report.html`: one page about a run, for people.

The page has no script and loads nothing. What depends on the clock and the machine stands in its section `machine`; the
rest is the same for every run of the same episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from harness1.config import Config
from harness1.errors import SchemaError, UsageError
from harness1.eval.ablations.table import COLUMNS, AblationTable, cells
from harness1.eval.compare.difference import config_difference
from harness1.eval.run_view import RunView, read_run
from harness1.eval.statistics import Interval
from harness1.records import Task
from harness1.runs.files import write_atomically
from harness1.runs.folder import METRICS, PROVENANCE, REPORT, RESOURCES, run_config, shown_config
from harness1.runs.provenance import SESSION
from harness1.runs.stage import Stage, read_stage
from harness1.runs.store import EPISODES
from harness1.viewer.html import render, shown

ABLATIONS = "ablations.json"
SHOWN = 8
"""The most tasks among the worst, and among the best."""
BINS = 10
CLOCKED = (*SESSION, "earlier")
"""Parts of the provenance that belong to a process or a machine, not to the run."""
PLACES = ("index", "source", "sources", "tokenizer")
"""Outputs of the card that are paths."""
TOOK = {
    "wall_seconds": "seconds on the clock",
    "episode_seconds": "seconds of all episodes together",
    "cost": "dollars",
}
"""Parts of the resources that have another name on the page."""
WORK = "machine."
"""Settings that decide how work is carried out, and change no episode."""


@dataclass(frozen=True)
class Histogram:
    """The number of tasks in ten bins of equal width from 0; the last bin holds its upper border.

    Attributes:
        places: decimals of the labels.
    """

    title: str
    values: Sequence[float]
    high: float
    places: int = 0

    @property
    def top(self) -> float:
        return self.high if self.high > 0.0 else 1.0

    @property
    def bins(self) -> list[tuple[str, int]]:
        counts, edges = np.histogram(np.clip(self.values, 0.0, self.top), BINS, (0.0, self.top))
        return [(f"{low:g} to {top:g}", int(count)) for low, top, count in zip(edges, edges[1:], counts, strict=False)]

    @property
    def peak(self) -> int:
        return max(count for _, count in self.bins)

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Report:
    """What the page tells of a run.

    Attributes:
        metrics, provenance, resources: the content of these files; empty where the folder lacks one.
        ablations: the table beside the run folder, where there is one.
        run: None where the episodes or their dataset cannot be read any more.
    """

    stage: Stage
    config: Config
    metrics: Mapping[str, Any]
    provenance: Mapping[str, Any]
    resources: Mapping[str, Any]
    ablations: AblationTable | None
    run: RunView | None

    @property
    def title(self) -> str:
        """Return the policy and the dataset of the run."""
        inputs, policy = self.stage.inputs, self.stage.outputs.get("policy", "run")
        return f"{policy} on {Path(str(inputs.get('dataset', '?'))).name}/{inputs.get('split', '?')}"

    def intervals(self, names: Iterable[str]) -> list[tuple[str, Interval]]:
        """Return the metrics of these names that have an interval. None has one where no task was scored."""
        found = ((name, self.metrics.get(name)) for name in names)
        return [
            (name, Interval(each["mean"], each["low"], each["high"]))
            for name, each in found
            if isinstance(each, dict) and each.keys() >= {"mean", "low", "high"} and each["mean"] is not None
        ]

    @property
    def ablation_rows(self) -> list[tuple[str, ...]]:
        """Return the headings and the lines of the table of ablations; nothing where there is none."""
        return [COLUMNS, *cells(self.ablations)] if self.ablations else []

    @property
    def histograms(self) -> list[Histogram]:
        """Return the distributions of tasks over recall, set size and turns."""
        rows = self.run.per_task.values() if self.run else ()
        found = []
        for name, places in (("curated_recall", 1), ("trajectory_recall", 1), ("set_size", 0), ("turns", 0)):
            if values := [row[name] for row in rows if name in row]:
                found.append(Histogram(name, values, 1.0 if places else max(values), places))
        return found

    @cached_property
    def worst_and_best(self) -> tuple[list[str], list[str]]:
        """Return the ids of the tasks of lowest and of highest curated recall; ties go by trajectory recall."""
        rows = self.run.per_task if self.run else {}

        def key(task: str) -> tuple[float, float]:
            return rows[task]["curated_recall"], rows[task].get("trajectory_recall", 0.0)

        ranked = sorted((task for task, row in sorted(rows.items()) if "curated_recall" in row), key=key)
        half = min(SHOWN, (len(ranked) + 1) // 2)
        return ranked[:half], sorted(ranked[half:], key=key, reverse=True)[:SHOWN]

    def changed(self, *, work: bool) -> list[tuple[str, Any, Any]]:
        """Return the settings that are not the default, each with its value and the default.

        Args:
            work: return those that decide how work is carried out, or all others.
        """
        pairs = config_difference(shown_config(self.config), shown_config(Config()))
        return [(name, *pair) for name, pair in pairs.items() if name.startswith(WORK) == work]

    @property
    def hashes(self) -> list[tuple[str, str]]:
        """Return the hashes of all that decided the episodes."""
        known = {**self.stage.hashes, **(self.provenance.get("hashes") or {})}
        return [(f"{name} hash", str(value)) for name, value in sorted(known.items())]

    @property
    def origin(self) -> list[tuple[str, Any]]:
        """Return what else the provenance says of the run, whoever ran it."""
        left_out = {*CLOCKED, "hashes", "dataset"}
        return [(name, value) for name, value in self.provenance.items() if name not in left_out]

    @property
    def machine(self) -> list[tuple[str, Any]]:
        """Return everything that depends on the clock, the machine, or where things lie."""
        outputs = self.stage.outputs
        rows = [("dataset", self.stage.inputs.get("dataset"))]
        rows += [(name, outputs[name]) for name in PLACES if outputs.get(name)]
        clocked = {key: self.provenance.get(key) for key in CLOCKED}
        return [*rows, *_took(self.resources), *_flat(clocked)]


def ensure_report(folder: Path, tasks: Iterable[Task] | None = None) -> None:
    """Write the report of a run folder as `write_report` does, unless it is there.

    A report that is there is up to date: what changes the other files of a run removes it.
    """
    if not (folder / REPORT).is_file():
        write_report(folder, tasks)


def write_report(folder: Path, tasks: Iterable[Task] | None = None) -> None:
    """Write the report of a run folder into it.

    Args:
        tasks: those of the run, with gold; None: read them from the dataset that its card names.

    Raises:
        UsageError: the folder is not a run folder, or has no metrics yet.
        SchemaError: one of its files is damaged.
    """
    report = read_report(folder, tasks)
    page = render("report.html", title=report.title, styles=("report.css",), report=report)
    write_atomically(folder / REPORT, "".join(page).encode())


def read_report(folder: Path, tasks: Iterable[Task] | None = None) -> Report:
    """Read what the report of a run tells. Arguments and errors are those of `write_report`."""
    config, _ = run_config(folder)
    stage = read_stage(folder)
    assert stage is not None
    if not (folder / METRICS).is_file():
        raise UsageError(f"{folder} has no {METRICS}: an evaluation writes it when it ends")
    metrics, provenance, resources = (_json(folder / name) for name in (METRICS, PROVENANCE, RESOURCES))
    ablations = _ablations(folder.resolve().parent / ABLATIONS)
    return Report(stage, config, metrics, provenance, resources, ablations, _run(folder, tasks))


def _run(folder: Path, tasks: Iterable[Task] | None) -> RunView | None:
    if not (folder / EPISODES).is_file():
        return None
    try:
        return read_run(folder, tasks=tasks)
    except UsageError:
        return None


def _took(resources: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a run took, under names that tell the time on the clock from the sum over episodes side by side."""
    for name, value in resources.items():
        if name == "per_episode":
            for unit, found in value.items():
                if found["mean"] is not None:
                    mean, low, high = (shown(found[each]) for each in ("mean", "low", "high"))
                    yield f"{TOOK.get(unit, unit)} for each episode", f"{mean} ({low} to {high})"
        elif name in TOOK:
            yield TOOK[name], value
        else:
            yield from _flat({name: value})


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested groups by their dotted names; empty lists and unknown values are left out."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and prefix.count(".") < 2 and name != "libraries":
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and value != []:
            yield f"{prefix}{name}", value


def _json(path: Path) -> dict[str, Any]:
    """Return the content of a file of JSON, which is empty where there is none."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise SchemaError(f"{path}: {error}") from error


def _ablations(path: Path) -> AblationTable | None:
    """Read the table of the ablations that a run is part of. Another file of that name is ignored."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AblationTable)
    except (OSError, msgspec.MsgspecError):
        return None
