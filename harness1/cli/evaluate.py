"""harness1 eval: a policy over a dataset."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from harness1.cli.index import ensure_index
from harness1.cli.options import ConfigFile, Force, Json, Overrides, PolicyName, progress_of_work, resolve, say_torn
from harness1.config import Config
from harness1.data.source import Source, open_source
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation
from harness1.eval.evaluate import evaluate as run_evaluation
from harness1.hashing import digest
from harness1.policy.registry import check_policy
from harness1.records import Episode
from harness1.retrieval.engines import open_retriever
from harness1.retrieval.index import build_hash
from harness1.run_folder import METRICS, clear_run

HEADLINE = (
    "curated_recall",
    "curated_precision",
    "curated_f1",
    "set_size",
    "trajectory_recall",
    "answer_recall",
    "turns",
    "reward",
)


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


def evaluate(
    dataset: Annotated[str, typer.Argument(help="A BEIR folder, world:SIZE or stdlib.")],
    policy: PolicyName = "scripted",
    split: Annotated[str, typer.Option("--split", help="Which tasks.")] = "test",
    limit: Limit = 0,
    samples: Samples = 1,
    seed: Seed = 0,
    index: IndexSpec = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; default runs/DATASET-SPLIT-POLICY.")] = None,
    cache: Cache = None,
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
    tasks = source.tasks(split)[: limit or None]
    check_policy(policy)
    name = source.name.replace(":", "-")
    out = out or Path("runs") / f"{name}-{split}-{policy.replace(':', '-').replace('/', '-')}"
    asked = index_of(source, index, cache, settings)
    evaluation = Evaluation(dataset, split, tasks, asked, policy, settings, samples, seed)
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


def evaluated(evaluation: Evaluation, out: Path, force: bool) -> dict[str, Any]:
    """Run what is missing in a run folder, under a progress bar; returns its metrics.

    Args:
        force: begin again, whatever the folder holds of earlier runs.
    """
    if force:
        clear_run(out)
    return _finished(evaluation, out) or _run(evaluation, out)


def print_metrics(metrics: dict[str, Any], title: str, out: Path) -> None:
    """The headline metrics with their 95 % intervals, and what failed."""
    table = Table(title=title, title_justify="left")
    for column in ("metric", "mean", "95 % interval"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name in HEADLINE:
        value = metrics.get(name)
        if value is not None and value["mean"] is not None:
            table.add_row(name, f"{value['mean']:.3f}", f"{value['low']:.3f} to {value['high']:.3f}")
    console = Console(highlight=False)
    console.print(table)
    failures = ", ".join(f"{count} {name}" for name, count in metrics["failures"].items() if count) or "none"
    console.print(f"{metrics['tasks']} tasks, failures: {failures}. Everything is in {out}.")


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


def _finished(evaluation: Evaluation, out: Path) -> dict[str, Any] | None:
    """The metrics of a run that is there already, unchanged; not of one that the infrastructure broke: it goes on."""
    if not (out / METRICS).is_file() or not evaluation.stage().is_done(out):
        return None
    found: dict[str, Any] = msgspec.json.decode((out / METRICS).read_bytes())
    return None if found["failures"]["infra_error"] else found


def _run(evaluation: Evaluation, out: Path) -> dict[str, Any]:
    with progress_of_work() as progress:
        bar = progress.add_task(f"{evaluation.policy} on {evaluation.dataset}", total=None)

        def start(finished: int, total: int) -> None:
            progress.update(bar, completed=finished, total=total)

        def advance(episode: Episode) -> None:
            progress.advance(bar)

        return run_evaluation(evaluation, out, start, advance, partial(say_torn, out))
