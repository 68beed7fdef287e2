"""`report.html`, a page about a run, which has no script and loads nothing. Everything that depends on the clock or the
machine is in the section `machine`; the rest is the same for every run of the same episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness1.config import Config
from harness1.config.settings import differences
from harness1.errors import UsageError
from harness1.eval.metrics import broken_lines, fault_reasons
from harness1.eval.run import PerTask, Run, read_run
from harness1.eval.statistics import Interval
from harness1.records import Task
from harness1.runs import folder as runs
from harness1.runs.files import Stage, read_json, write_atomically
from harness1.runs.journal import EPISODES
from harness1.viewer.html import format_value, render

SHOWN = 8  # limit of the worst tasks, and of the best
BINS = 10
CLOCKED = (*runs.SESSION, "earlier")  # provenance of a process or a machine, not of the run
PLACES = ("index", "source", "sources", "tokenizer")  # outputs of the card that are paths
TOOK = {
    "wall_seconds": "seconds on the clock",
    "episode_seconds": "seconds of all episodes together",
    "cost": "dollars",
}  # resources with another name on the page
WORK = "machine."  # prefix of settings that do not affect episodes


@dataclass(frozen=True)
class Histogram:
    """Numbers of tasks in ten equal bins from 0, the last with its upper end. Labels have `places` decimals."""

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
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Report:
    """The contents of the page; of missing files, empty. `run`: None if the episodes or the dataset cannot be read."""

    stage: Stage
    config: Config
    metrics: Mapping[str, Any]
    provenance: Mapping[str, Any]
    resources: Mapping[str, Any]
    run: Run | None

    @property
    def title(self) -> str:
        inputs, policy = self.stage.inputs, self.stage.outputs.get("policy", "run")
        return f"{policy} on {Path(str(inputs.get('dataset', '?'))).name}/{inputs.get('split', '?')}"

    def intervals(self, names: Iterable[str]) -> list[tuple[str, Interval]]:
        """Return the named metrics that have an interval; without scored tasks, there are none."""
        values = ((name, self.metrics.get(name)) for name in names)
        return [
            (name, Interval(each["mean"], each["low"], each["high"]))
            for name, each in values
            if isinstance(each, dict) and each.keys() >= {"mean", "low", "high"} and each["mean"] is not None
        ]

    @property
    def histograms(self) -> list[Histogram]:
        """The distributions of tasks over recall, set size and turns."""
        rows = self.run.per_task.values() if self.run else ()
        found = []
        for name, places in (("curated_recall", 1), ("trajectory_recall", 1), ("set_size", 0), ("turns", 0)):
            if values := [row[name] for row in rows if name in row]:
                found.append(Histogram(name, values, 1.0 if places else max(values), places))
        return found

    @property
    def worst_and_best(self) -> tuple[list[str], list[str]]:
        return worst_and_best(self.run.per_task if self.run else {})

    def changes(self, *, work: bool) -> list[tuple[str, Any, Any]]:
        """Return the changed settings, each with its value and the default: of the machine if `work`, or not."""
        pairs = sorted(differences(runs.public_config(self.config), runs.public_config(Config())))
        return [pair for pair in pairs if pair[0].startswith(WORK) == work]

    @property
    def hashes(self) -> list[tuple[str, str]]:
        known = {**self.stage.hashes, **(self.provenance.get("hashes") or {})}
        return [(f"{name} hash", str(value)) for name, value in sorted(known.items())]

    @property
    def origin(self) -> list[tuple[str, Any]]:
        """The rest of the provenance that does not depend on the machine."""
        left_out = {*CLOCKED, "hashes", "dataset"}
        return [(name, value) for name, value in self.provenance.items() if name not in left_out]

    @property
    def machine(self) -> list[tuple[str, Any]]:
        """Return everything that depends on the clock, the machine, or paths."""
        outputs = self.stage.outputs
        rows = [("dataset", self.stage.inputs.get("dataset"))]
        rows += [(name, outputs[name]) for name in PLACES if outputs.get(name)]
        for name, value in self.resources.items():
            if name == "per_episode":
                for unit, interval in value.items():
                    if interval["mean"] is not None:
                        mean, low, high = (format_value(interval[each]) for each in ("mean", "low", "high"))
                        rows.append((f"{TOOK.get(unit, unit)} for each episode", f"{mean} ({low} to {high})"))
            else:
                rows += [(TOOK[name], value)] if name in TOOK else _flat({name: value})
        return [*rows, *_flat({key: self.provenance.get(key) for key in CLOCKED})]


def worst_and_best(rows: PerTask) -> tuple[list[str], list[str]]:
    """Return the ids of the tasks with the lowest and the highest curated recall, then trajectory recall."""

    def key(task: str) -> tuple[float, float]:
        return rows[task]["curated_recall"], rows[task].get("trajectory_recall", 0.0)

    ranked = sorted((task for task, row in sorted(rows.items()) if "curated_recall" in row), key=key)
    half = min(SHOWN, (len(ranked) + 1) // 2)
    return ranked[:half], sorted(ranked[half:], key=key, reverse=True)[:SHOWN]


def ensure_report(folder: Path, tasks: Iterable[Task] | None = None) -> None:
    """Write the report of a run folder, unless it exists: commands that change the other files of a run remove it."""
    if not (folder / runs.REPORT).is_file():
        write_report(folder, tasks)


def write_report(folder: Path, tasks: Iterable[Task] | None = None) -> None:
    """Write the report of a run folder. `tasks`: those of the run, with gold; None reads them from its dataset. Raises
    UsageError: the folder is no run folder, or has no metrics yet; SchemaError: one of its files is damaged."""
    stage = runs.read_run_card(folder)
    config, _ = runs.run_config(folder, stage)
    if not (folder / runs.METRICS).is_file():
        raise UsageError(f"{folder} has no {runs.METRICS}: an evaluation writes it when it ends")
    paths = (folder / name for name in (runs.METRICS, runs.PROVENANCE, runs.RESOURCES))
    metrics, provenance, resources = (read_json(path) if path.is_file() else {} for path in paths)
    run = None
    with suppress(UsageError):
        run = read_run(folder, tasks=tasks) if (folder / EPISODES).is_file() else None
    report = Report(stage, config, metrics, provenance, resources, run)
    told = {"broken": list(broken_lines(report.metrics)), "fault_reasons": fault_reasons(report.metrics)}
    page = render("report.html", title=report.title, styles=("report.css",), report=report, **told)
    write_atomically(folder / runs.REPORT, "".join(page).encode())


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and prefix.count(".") < 2 and name != "libraries":
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and value != []:
            yield f"{prefix}{name}", value
