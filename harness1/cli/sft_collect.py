"""harness1 sft collect: record a teacher's episodes over the tasks of a split."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from harness1.cli.bars import read_aloud
from harness1.cli.dashboard import evaluated
from harness1.cli.datasets import place_of
from harness1.cli.options import (
    AllowFaults,
    Cache,
    ConfigFile,
    CountedFaults,
    Exclude,
    Force,
    IndexSpec,
    Json,
    Limit,
    Overrides,
    Rewards,
    Samples,
    Seed,
    ShareOf,
    Tools,
    resolve,
)
from harness1.cli.policies import POLICIES
from harness1.cli.printing import print_result, say
from harness1.cli.results import print_metrics, refuse_faults
from harness1.data.indexing import index_of
from harness1.data.leaks import TaskFilter
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation
from harness1.eval.metrics import fault_count
from harness1.sft.collect import is_hosted, student_place, tasks_of_runs, teacher_policy, teaching_tasks


def collect(
    data: Annotated[
        str, Option(help="A name in `data list`, a BEIR or TREC folder, or world:SIZE.", metavar="DATASET")
    ],
    out: Annotated[Path, Option(help="Run folder.", metavar="RUN")],
    teacher: Annotated[str, Option(help=f"The policy to learn from: {POLICIES}.", metavar="NAME")] = "oracle",
    split: Annotated[str, Option(help="The split to take tasks from; never test.")] = "train",
    chat: Annotated[
        str | None, Option("--format", help="The student's chat format; default policy.format.", metavar="FORMAT")
    ] = None,
    tokenizer: Annotated[
        str | None,
        Option(
            help="The student's model, or a folder with its tokenizer.json: contexts are counted with it, and its"
            " token ids recorded. Without it, the counts are approximate, and `sft build` needs --rerender.",
            metavar="PATH",
        ),
    ] = None,
    share: ShareOf = "",
    exclude: Exclude = None,
    limit: Limit = 0,
    samples: Samples = 1,
    seed: Seed = 0,
    index: IndexSpec = None,
    cache: Cache = None,
    tools: Tools = None,
    rewards: Rewards = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    faults: CountedFaults = "exclude",
    allow_faults: AllowFaults = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Record a teacher's episodes to learn from. The same command resumes a stopped collection.

    Where the infrastructure broke an episode even after retries, the exit code is 3, and the same command plays it
    again.

    Example: harness1 sft collect --data world:1000 --teacher oracle --out runs/teacher --tokenizer models/smollm2
    """
    if chat and not tokenizer:
        raise UsageError("--format is the student's: give its --tokenizer too")
    overrides = [*(overrides or []), *([f"policy.format={chat}"] if chat else [])]
    settings = resolve(config, overrides, teacher, tokenizer or "", tools=tools, rewards=rewards)
    policy = teacher_policy(teacher, settings)
    source = open_source(data := place_of(data, settings))
    sieve = TaskFilter(settings.data, (), share, tasks_of_runs(exclude or ()))
    tasks = teaching_tasks(source, split, limit, settings, sieve)
    student = student_place(tokenizer, source, tasks, settings) if tokenizer else ""
    asked = index_of(source, index, cache, settings, read_aloud, say)
    hosted = is_hosted(policy)
    evaluation = Evaluation(data, split, tasks, asked, policy, settings, samples, seed, hosted, student, share, faults)
    metrics = evaluated(evaluation, out, force)
    print_result(metrics, as_json, print_metrics, f"{policy} on {source.name}/{split}", out)
    refuse_faults({policy: fault_count(metrics)}, metrics["episodes"], allow_faults)
