"""harness1 rl check: find the tasks that are worth training on under a reward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Option

from harness1.cli.bars import progress_of_work, read_aloud
from harness1.cli.datasets import evaluation_places, place_of
from harness1.cli.options import (
    Against,
    Cache,
    ConfigFile,
    DatasetName,
    Exclude,
    Force,
    IndexSpec,
    Json,
    Limit,
    Overrides,
    Rewards,
    Seed,
    ShareOf,
    Tools,
    resolve,
)
from harness1.cli.printing import print_result, say, say_left_out
from harness1.cli.results import headed
from harness1.cli.rl_judge import Judged, JudgedRun, JudgeModel, asked_judge, judge_runs, print_findings
from harness1.cli.terminal import Terminal
from harness1.data.indexing import index_of
from harness1.data.open import open_source
from harness1.rl.admission import ORACLE, ORDER, POLICIES, RUNS, AdmissionReport, Check, lives_on, tasks_to_check
from harness1.rl.admission import check as run_check
from harness1.sft.collect import student_place, tasks_of_runs
from harness1.viewer.report import ensure_report


def check(
    dataset: DatasetName,
    split: Annotated[
        str, Option(help="The split to take tasks from; default train, else dev, else the only split.")
    ] = "",
    tokenizer: Annotated[
        str,
        Option(help="The student's model: contexts are counted with its tokenizer, as in training.", metavar="PATH"),
    ] = "",
    share: ShareOf = "",
    against: Against = None,
    exclude: Exclude = None,
    limit: Limit = 0,
    seed: Seed = 0,
    index: IndexSpec = None,
    out: Annotated[
        Path | None, Option(help="Folder of the report; default runs/DATASET-SPLIT-check.", metavar="RUN")
    ] = None,
    cache: Cache = None,
    judge: JudgeModel = "",
    run: JudgedRun = None,
    judged: Judged = 20,
    tools: Tools = None,
    rewards: Rewards = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Play policies that should earn nothing, little or everything on a task set, and judge each task by the rewards.
    The same command resumes a stopped check.

    A judge reads the best-paid episodes of every policy but the oracle, or those of --run (a run, or a training). Its
    replies are kept in judge.jsonl of its folder. Exit code 1 if a policy that does not think reaches `rl.easy`.

    Example: harness1 rl check world:1000 --limit 50 --out runs/check --config rl/small
    """
    settings = resolve(config, overrides, tokenizer, tools=tools, rewards=rewards)
    reviewer = asked_judge(judge, run, settings)
    source = open_source(dataset := place_of(dataset, settings))
    split = split or source.training_split()
    excluded = tasks_of_runs(exclude or ())
    places = evaluation_places(against, settings)
    tasks, selection = tasks_to_check(source, split, limit, settings.data, share, places, excluded)
    if selection:
        say_left_out(selection)
    out = out or Path("runs") / f"{source.name.replace(':', '-')}-{split}-check"
    student = student_place(tokenizer, source, tasks, settings) if tokenizer else ""
    place = index_of(source, index, cache, settings, read_aloud, say)
    report = _checked(Check(dataset, split, tasks, place, settings, seed, student, selection), out, force=force)
    if reviewer is None:
        print_result(report, as_json, print_report, settings.rl.headroom, out)
    else:
        runs = [run] if run is not None else [out / RUNS / policy for policy in POLICIES if policy != ORACLE]
        found = judge_runs(reviewer, judge, runs, tasks, judged, out, force=force)
        whole = msgspec.to_builtins(report) | {"judge": msgspec.to_builtins(found)}
        print_result(whole, as_json, lambda _: print_report(report, settings.rl.headroom, out))
        if not as_json:
            print_findings(found)
    refuse_easy(report, settings.rl.easy)


def refuse_easy(report: AdmissionReport, bound: float) -> None:
    """End with exit code 1 if a policy that does not think comes as far as the oracle."""
    best = report.easiest
    if best.score < bound or bound == 1.0:
        return
    say(
        f"TOO EASY: {best.policy}, which does not think, earns {best.reward:.3f}, {best.score:.0%} of what the oracle"
        " gains over doing nothing. There is nothing to learn: take harder tasks, or a reward that tells them apart;"
        " --set rl.easy=1 goes on"
    )
    raise typer.Exit(1)


def print_report(report: AdmissionReport, headroom: float, out: Path) -> None:
    """Print the rewards of the policies with their largest terms, and the number of admitted tasks."""
    columns = ("policy", "reward", "score", "recall", "precision", "set size", "lives on")
    table = headed(*columns, left=("lives on",))
    for each in report.policies:
        shown = [f"{figure:.3f}" for figure in (each.reward, each.score, each.recall, each.precision)]
        table.add_row(each.policy, *shown, f"{each.set_size:.1f}", lives_on(each))
    console = Terminal()
    console.print(f"{report.dataset}/{report.split}, reward {report.recipe}", soft_wrap=True)
    console.print(table)
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.reasons.items()) or "none"
    console.print(f"{len(report.tasks)} tasks, {len(report.admitted())} admitted; rejected for: {reasons}.")
    console.print(f"{len(report.admitted(headroom))} of them have headroom of at least {headroom:g}.")
    right, differing = report.ranked
    console.print(f"In order ({' > '.join(ORDER)}) on {right} of {differing} tasks where recalls differ.")
    console.print(f"Everything is in {out}.")


def _checked(job: Check, out: Path, *, force: bool) -> AdmissionReport:
    """Check under a bar that counts the episodes of all policies."""
    with progress_of_work() as progress:
        bar = progress.add_task("", total=(len(POLICIES) + 1) * len(job.tasks))  # one policy plays twice

        def start(policy: str, finished: int, _total: int) -> None:
            progress.update(bar, description=f"{policy} on {job.dataset}", advance=finished)

        found = run_check(job, out, force=force, on_policy=start, on_episode=lambda _: progress.advance(bar))
    for policy in POLICIES:
        ensure_report(out / RUNS / policy, job.tasks)
    return found
