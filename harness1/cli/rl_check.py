"""harness1 rl check and pivots: the tasks, and the turns, that are worth training on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from harness1.cli.options import (
    Against,
    Cache,
    ConfigFile,
    DatasetName,
    EngineOption,
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
    evaluation_places,
    place_of,
    resolve,
)
from harness1.cli.policies import POLICY_NAMES
from harness1.cli.printing import print_result, say, say_left_out, say_torn
from harness1.cli.progress import Terminal, make_table, progress_of_work, read_aloud
from harness1.config import Config
from harness1.data.indexing import index_of
from harness1.data.leaks import Selection
from harness1.data.open import open_source
from harness1.engines.open import open_start
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation
from harness1.models.fetch import resolve_model
from harness1.models.open import Completing, open_completer
from harness1.models.spec import ModelSpec
from harness1.policy.policy import Policy
from harness1.policy.registry import check_policy, needs_gold, open_policy
from harness1.records import Task
from harness1.rl.admission import (
    COLUMNS,
    HEADROOM,
    ORACLE,
    ORDER,
    POLICIES,
    RUNS,
    AdmissionReport,
    tasks_to_check,
)
from harness1.rl.admission import check as run_check
from harness1.rl.pivots import Profile, profile
from harness1.rl.red_team import MOST_TOKENS, REPLIES, RedTeamReport, best_paid, review
from harness1.rl.rollouts import open_policy_to_train
from harness1.rl.train import EPISODES
from harness1.sft.collect import open_runs, student_place, tasks_of_runs
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
    reviewer = choose_judge(judge, run, settings)
    source = open_source(dataset := place_of(dataset, settings))
    split = split or source.training_split()
    apart = evaluation_places(against, settings), tasks_of_runs(exclude or ())
    tasks, selection = tasks_to_check(source, split, limit, settings.data, share, *apart)
    if selection:
        say_left_out(selection)
    out = out or Path("runs") / f"{source.name.replace(':', '-')}-{split}-check"
    student = student_place(tokenizer, source, tasks, settings) if tokenizer else ""
    place = index_of(source, index, cache, settings, read_aloud, say)
    job = Evaluation(dataset, split, tasks, place, ORACLE, settings, seed=seed, student=student)
    report = _check(job, selection, out, force=force)
    if reviewer is None:
        print_result(report, as_json, print_report, out)
    else:
        runs = [run] if run is not None else [out / RUNS / policy for policy in POLICIES if policy != ORACLE]
        found = judge_runs(reviewer, judge, runs, tasks, judged, out, force=force)
        whole = msgspec.to_builtins(report) | {"judge": msgspec.to_builtins(found)}
        print_result(whole, as_json, lambda _: print_report(report, out))
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


def print_report(report: AdmissionReport, out: Path) -> None:
    """Print the rewards of the policies with their largest terms, and the number of admitted tasks."""
    table = make_table(*COLUMNS, left=("lives on",))
    for each in report.policies:
        table.add_row(*each.list_cells())
    console = Terminal()
    console.print(f"{report.dataset}/{report.split}, reward {report.recipe}", soft_wrap=True)
    console.print(table)
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.reasons.items()) or "none"
    console.print(f"{len(report.tasks)} tasks, {len(report.list_admitted())} admitted; rejected for: {reasons}.")
    console.print(f"{len(report.list_admitted(HEADROOM))} of them have headroom of at least {HEADROOM:g}.")
    right, differing = report.ranked
    console.print(f"In order ({' > '.join(ORDER)}) on {right} of {differing} tasks where recalls differ.")
    console.print(f"Everything is in {out}.")


def _check(job: Evaluation, selection: Selection | None, out: Path, *, force: bool) -> AdmissionReport:
    """Check under a bar that counts the episodes of all policies."""
    with progress_of_work() as progress:
        bar = progress.add_task("", total=(len(POLICIES) + 1) * len(job.tasks))  # one policy plays twice

        def start(policy: str, finished: int, _total: int) -> None:
            progress.update(bar, description=f"{policy} on {job.dataset}", advance=finished)

        found = run_check(job, out, selection, force=force, on_policy=start, on_episode=lambda _: progress.advance(bar))
    for policy in POLICIES:
        ensure_report(out / RUNS / policy, job.tasks)
    return found


JudgeModel = Annotated[
    str, Option(help="A model that reads well-paid episodes for tricks.", metavar="openai:MODEL@URL|hf:PATH")
]
JudgedRun = Annotated[
    Path | None, Option(help="With --judge: read the episodes of this run, not the check's own.", metavar="RUN")
]
Judged = Annotated[int, Option(help="With --judge: about this many episodes.", min=1)]


def choose_judge(name: str, run: Path | None, config: Config) -> Completing | None:
    """Open the judge, if there is one; raise UsageError if only its run is named."""
    if run is not None and not name:
        raise UsageError("--run names the episodes that a judge reads: give --judge too")
    return open_completer(name, config, MOST_TOKENS) if name else None


def judge_runs(
    judge: Completing, name: str, runs: Sequence[Path], tasks: Sequence[Task], count: int, out: Path, *, force: bool
) -> RedTeamReport:
    """Have about `count` of the best-paid episodes of runs judged, under a bar; a training is read by the run in it.
    `tasks`: those whose gold is known. `force`: ask again what was answered. Raise as `best_paid` and `review`."""
    golds = {task.task_id: task.gold for task in tasks if task.gold is not None}
    folders = [run / EPISODES if (run / EPISODES).is_dir() else run for run in runs]
    if force:
        (out / REPLIES).unlink(missing_ok=True)
    paid = best_paid(folders, count, golds)
    with progress_of_work() as progress:
        bar = progress.add_task(f"{name} judges", total=len(paid))
        return review(paid, name, judge, out, lambda: progress.advance(bar))


def print_findings(found: RedTeamReport) -> None:
    """Print what a judge found, and what it cost."""
    console = Terminal()
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kinds.items())) or "none"
    console.print(
        f"{found.judge} read {found.episodes} well-paid episodes: {found.honest} honest, {found.tricks} with a trick"
        f" ({kinds}), {found.invalid} replies that cannot be checked, {found.missing} missing.",
        soft_wrap=True,
    )
    for each in found.findings:
        place = f"{Path(each.run).name}, task {each.task_id}, reward {each.reward:.3f}, turn {each.turn}"
        console.print(f"  {each.kind}: {place}: {each.quote!r}", soft_wrap=True)
    for fault in found.faults:
        console.print(f"  missing: {fault}", soft_wrap=True)
    console.print(f"The judge read {found.prompt_tokens:,} tokens and wrote {found.output_tokens:,}.")


def pivots(
    run: Annotated[Path, Argument(help="A run folder of `harness1 sft collect`.", metavar="SFT_RUN")],
    out: Annotated[Path, Option(help="Folder for the profile.", metavar="PIVOTS")],
    policy: Annotated[
        str,
        Option(
            "--policy",
            "--model",
            help=f"The frozen reference, from which training will begin: {POLICY_NAMES}.",
            metavar="SPEC",
        ),
    ],
    index: IndexSpec = None,
    against: Against = None,
    exclude: Exclude = None,
    engine: EngineOption = "",
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Try every turn of a teacher with a reference policy, and keep those that it sometimes gets right. States are
    rebuilt by replay; the environment is that of the run. The same command resumes a stopped profile.

    Example: harness1 rl pivots runs/teacher --out pivots --policy hf:student
    """
    settings = resolve(config, overrides)
    if needs_gold(policy):
        raise UsageError(f"{policy} sees the gold: profile with the policy that is to be trained")
    check_policy(policy, settings)
    taught = open_runs([run], rerendered=True)[0]
    settings = msgspec.structs.replace(settings, env=taught.config.env, index=taught.config.index)
    apart = evaluation_places(against, settings), tasks_of_runs(exclude or ())
    work = Profile(taught, _reference(policy, engine, settings), policy, settings, index or "", *apart)
    say_left_out(work.selection)
    with progress_of_work() as progress:
        bar = progress.add_task(f"{policy} on turns of {run}", total=None)

        def show(done: int, of: int) -> None:
            progress.update(bar, completed=done, total=of)

        found = profile(work, out, force=force, on_torn=partial(say_torn, run), on_pivot=show)
    print_result(found, as_json, _print, policy, out)


def _reference(name: str, engine: str, settings: Config) -> Policy:
    """Return the policy to profile with; that of a training service is sampled there, as it is in training."""
    if not engine:
        return open_policy(name, {}, settings)
    sampler = open_start(engine, resolve_model(ModelSpec.read(name).model), settings)
    return open_policy_to_train(name, settings, sampler)


def _print(found: dict[str, dict[str, Any]], policy: str, out: Path) -> None:
    fates_of_all = (name.replace("_", " ") for name in found["fates"]["all"])
    table = make_table("expert's tool", *fates_of_all)
    for name, fates in found["fates"].items():
        table.add_row(name, *map(str, fates.values()))
    console = Terminal()
    console.print(f"Turns tried by {policy}", soft_wrap=True)
    console.print(table)
    splits = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found["splits"].items()) or "none"
    console.print(f"kept: {splits}. Everything is in {out}.")
