"""harness1 eval: a policy over a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from harness1.cli.ablate import run_ablations
from harness1.cli.bars import read_aloud
from harness1.cli.dashboard import evaluated
from harness1.cli.datasets import place_of
from harness1.cli.options import (
    AllowFaults,
    Cache,
    ConfigFile,
    CountedFaults,
    DatasetName,
    Force,
    IndexSpec,
    Json,
    Limit,
    Overrides,
    Rewards,
    Samples,
    Seed,
    Tools,
    resolve,
)
from harness1.cli.policies import PolicyName
from harness1.cli.printing import print_result, say
from harness1.cli.results import print_metrics, refuse_faults
from harness1.data.indexing import index_of
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.eval.ablations import ABLATIONS
from harness1.eval.evaluate import Evaluation, rescore
from harness1.eval.metrics import fault_count
from harness1.models.spec import is_model
from harness1.policy.registry import check_policy
from harness1.records import Task
from harness1.sft.collect import student_place
from harness1.viewer.pages import ensure_view

Ablations = Annotated[
    str | None,
    Option(
        "--ablations",
        help=f"Also run without one mechanism at a time, and compare: all, or some of {', '.join(ABLATIONS)}.",
        metavar="NAME,NAME",
    ),
]

StudentTokenizer = Annotated[
    str,
    Option(
        help="A model that the policy is compared with: contexts are counted with its tokenizer, and the policy's"
        " turns are written in its format. Not for policies that are models.",
        metavar="PATH",
    ),
]
Rescored = Annotated[
    bool,
    Option(
        "--rescore", help="First score the recorded episodes again, with changed gold or reward, without playing them."
    ),
]


def evaluate(
    dataset: DatasetName,
    policy: PolicyName = "scripted",
    split: Annotated[str, Option(help="The split to take tasks from; default test, else dev.")] = "",
    tokenizer: StudentTokenizer = "",
    limit: Limit = 0,
    samples: Samples = 1,
    seed: Seed = 0,
    index: IndexSpec = None,
    out: Annotated[Path | None, Option(help="Run folder; default runs/DATASET-SPLIT-POLICY.")] = None,
    cache: Cache = None,
    ablations: Ablations = None,
    tools: Tools = None,
    rewards: Rewards = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    faults: CountedFaults = "exclude",
    allow_faults: AllowFaults = 0,
    force: Force = False,
    rescored: Rescored = False,
    view: Annotated[
        bool, Option("--view/--no-view", help="Write view.html, with the episodes of the worst and the best tasks.")
    ] = True,
    max_mb: Annotated[float, Option(help="Maximum size of view.html in megabytes.", min=1)] = 60.0,
    as_json: Json = False,
) -> None:
    """Run a policy over the tasks of a dataset. The index is built once and kept; a stopped run is resumed.

    Where the infrastructure broke an episode even after retries, the exit code is 3, and the same command plays it
    again.

    Example: harness1 eval world:1000 --policy scripted --limit 50 --out runs/world
    """
    if force and rescored:
        raise UsageError("--force plays again and --rescore scores without playing: choose one")
    if tokenizer and is_model(policy):
        raise UsageError(f"{policy} counts with its own tokenizer: leave --tokenizer out")
    settings = resolve(config, overrides, policy, tokenizer, tools=tools, rewards=rewards)
    check_policy(policy, settings)
    source = open_source(dataset := place_of(dataset, settings))
    split = split or ("dev" if "test" not in source.splits and "dev" in source.splits else "test")
    tasks = _first(source, split, limit)
    name = f"{source.name}-{split}-{policy}".replace(":", "-").replace("/", "-")
    out = out or Path("runs") / f"{name}{'' if ablations is None else '-ablations'}"
    asked = index_of(source, index, cache, settings, read_aloud, say)
    student = student_place(tokenizer, source, tasks, settings) if tokenizer else ""
    evaluation = Evaluation(
        dataset, split, tasks, asked, policy, settings, samples, seed, student=student, faults=faults
    )
    if ablations is not None:
        run_ablations(evaluation, out, ablations, allow_faults, force=force, rescored=rescored, as_json=as_json)
        return
    if rescored:
        rescore(evaluation, out)
    metrics = evaluated(evaluation, out, force)
    if view:
        ensure_view(out, tasks, int(max_mb * 1e6))
    print_result(metrics, as_json, print_metrics, f"{policy} on {source.name}/{split}", out)
    refuse_faults({policy: fault_count(metrics)}, metrics["episodes"], allow_faults)


def _first(source: Source, split: str, limit: int) -> list[Task]:
    """Return the first tasks of a split, or all; tell the user if there are fewer than asked for."""
    tasks = source.tasks(split)
    if limit > len(tasks) > 0:
        say(f"{source.name} has {len(tasks)} tasks in split {split}, not {limit}")
    return tasks[: limit or None]
