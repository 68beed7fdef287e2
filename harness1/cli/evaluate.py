"""harness1 eval: a policy over a dataset."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from harness1.cli.ablate import run_ablations
from harness1.cli.dashboard import dashboard_of_evaluation
from harness1.cli.index import ensure_index
from harness1.cli.options import ConfigFile, Force, Json, Overrides, PolicyName, resolve, say_torn
from harness1.config import Config
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.eval.ablations.run import ABLATIONS
from harness1.eval.evaluate import Evaluation, finished_metrics
from harness1.eval.evaluate import evaluate as run_evaluation
from harness1.eval.metrics import HEADLINE
from harness1.hashing import digest
from harness1.policy.registry import check_policy
from harness1.records import Episode, Task
from harness1.retrieval.index.index import build_hash
from harness1.retrieval.open import open_retriever
from harness1.runs.folder import clear_run
from harness1.runs.stage import read_stage
from harness1.viewer.report import ensure_report

Limit = Annotated[int, typer.Option("--limit", help="The first N tasks; 0 means all.", min=0)]
Samples = Annotated[int, typer.Option("--samples", help="Episodes for each task.", min=1)]
Seed = Annotated[int, typer.Option("--seed", help="For policies that draw, and for the bootstrap.")]
IndexSpec = Annotated[
    str | None,
    typer.Option("--index", help="An index or engine to ask, instead of indexing the dataset.", metavar="SPEC"),
]
Cache = Annotated[
    Path | None, typer.Option("--cache", help="Where indexes are kept; default ~/.cache/harness1.", metavar="DIR")
]
Ablations = Annotated[
    str | None,
    typer.Option(
        "--ablations",
        help=f"Also without one mechanism at a time, and compare: all, or some of {', '.join(ABLATIONS)}.",
        metavar="NAME,NAME",
    ),
]


def evaluate(
    dataset: Annotated[str, typer.Argument(help="A BEIR or TREC folder, NAME:PATH (see `data list`) or world:SIZE.")],
    policy: PolicyName = "scripted",
    split: Annotated[str, typer.Option("--split", help="Which tasks.")] = "test",
    limit: Limit = 0,
    samples: Samples = 1,
    seed: Seed = 0,
    index: IndexSpec = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; default runs/DATASET-SPLIT-POLICY.")] = None,
    cache: Cache = None,
    ablations: Ablations = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run a policy over the tasks of a dataset. The index is built once and kept; a stopped run is resumed.

    Example: harness1 eval world:1000 --policy scripted --limit 50 --out runs/world
    """
    settings = resolve(config, overrides)
    source = open_source(dataset)
    tasks = _first(source, split, limit)
    check_policy(policy)
    name = f"{source.name}-{split}-{policy}".replace(":", "-").replace("/", "-")
    out = out or Path("runs") / f"{name}{'' if ablations is None else '-ablations'}"
    asked = index_of(source, index, cache, settings)
    evaluation = Evaluation(dataset, split, tasks, asked, policy, settings, samples, seed)
    if ablations is not None:
        run_ablations(evaluation, out, ablations, evaluated, force=force, as_json=as_json)
        return
    metrics = evaluated(evaluation, out, force)
    if as_json:
        print(msgspec.json.encode(metrics).decode())
    else:
        print_metrics(metrics, f"{policy} on {source.name}/{split}", out)


def index_of(source: Source, index: str | None, cache: Path | None, config: Config) -> str:
    """The index that a user names, or the dataset's own, which is built into the cache unless it is there.

    Raises:
        UsageError: the named one is scored by another unit than the configuration says.
    """
    return _checked(index, config) if index else _own_index(source, cache, config)


def evaluated(evaluation: Evaluation, out: Path, force: bool = False) -> dict[str, Any]:
    """Run what is missing in a run folder, under a progress bar; returns its metrics.

    Args:
        force: begin again, whatever the folder holds of earlier runs.
    """
    if force:
        clear_run(out)
    metrics = finished_metrics(evaluation, out) or _run(evaluation, out)
    ensure_report(out, evaluation.tasks)
    return metrics


def print_metrics(metrics: dict[str, Any], title: str, out: Path) -> None:
    """The headline metrics with their 95 % intervals, and what failed."""
    table = Table(title=title, title_justify="left")
    for column in ("metric", "mean", "95 % interval"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name in HEADLINE:
        value = metrics.get(name)
        if value is not None and value["mean"] is not None:
            table.add_row(name, _figure(value["mean"]), f"{_figure(value['low'])} to {_figure(value['high'])}")
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    failures = ", ".join(f"{count} {name}" for name, count in metrics["failures"].items() if count) or "none"
    console.print(f"{metrics['tasks']} tasks, failures: {failures}. Everything is in {out}.", soft_wrap=True)
    stage = read_stage(out)
    if stage is not None and "trec_ids" in stage.outputs:
        console.print(f"Some ids hold white space: in the TREC runs all are {stage.outputs['trec_ids']}.")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def _first(source: Source, split: str, limit: int) -> list[Task]:
    """The first tasks of a split, or all; says so where there are fewer than were asked for."""
    tasks = source.tasks(split)
    if limit > len(tasks) > 0:
        print(f"harness1: {source.name} has {len(tasks)} tasks in split {split}, not {limit}", file=sys.stderr)
    return tasks[: limit or None]


def _own_index(source: Source, cache: Path | None, config: Config) -> str:
    """The index of a dataset, built into the cache unless it is there."""
    name = f"{source.name.replace(':', '-')}-{digest([source.fingerprint, build_hash(config.index)])[:12]}"
    folder = (cache or Path.home() / ".cache" / "harness1") / name
    ensure_index(source, folder, config)
    return str(folder)


def _checked(index: str, config: Config) -> str:
    unit = open_retriever(index, config).info.unit
    if unit != config.index.unit:
        raise UsageError(f"{index} is scored by {unit}: --set index.unit={unit}")
    return index


def _run(evaluation: Evaluation, out: Path) -> dict[str, Any]:
    golds = {task.task_id: task.gold for task in evaluation.tasks}
    with dashboard_of_evaluation(f"{evaluation.policy} on {evaluation.dataset} ({out.name})") as board:

        def advance(episode: Episode) -> None:
            board.episode(episode, golds[episode.task.task_id])

        def include(episode: Episode) -> None:
            board.earlier(episode, golds[episode.task.task_id])

        return run_evaluation(evaluation, out, board.start, advance, partial(say_torn, out), board.queues, include)
