"""harness1 rl: the tasks and the turns that are worth training on, and training on a policy's own episodes, or of the
model behind any agent."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from harness1.agents.process import arguments_of, find_sandbox
from harness1.agents.sandbox import Sandbox, closed_paths, inherit, needed_paths
from harness1.cli import options
from harness1.cli.options import evaluation_places, place_of, resolve
from harness1.cli.policies import POLICY_NAMES
from harness1.cli.printing import print_result, put, say, say_left_out, say_torn
from harness1.cli.progress import print_table, progress_of_work, read_aloud
from harness1.cli.training import TrainingBoard, lead_group, print_checkpoint, refuse_oversized_rl
from harness1.config import Config
from harness1.data.indexing import index_of
from harness1.data.leaks import Selection, ShareName
from harness1.data.open import from_anywhere, open_source
from harness1.engines.engine import open_service_engine
from harness1.engines.open import open_service, open_start
from harness1.errors import UsageError, optional
from harness1.eval.evaluate import Evaluation
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.models.fetch import resolve_model
from harness1.models.open import Completing, open_completer
from harness1.models.spec import ModelSpec
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.policy import Policy
from harness1.policy.registry import check_policy, needs_gold, open_policy
from harness1.records import Task
from harness1.rl import admission as checking
from harness1.rl.pivots import Profile, profile
from harness1.rl.red_team import MOST_TOKENS, REPLIES, RedTeamReport, best_paid, review
from harness1.rl.rollouts import open_policy_to_train, reserve_devices
from harness1.rl.train import (
    EPISODES,
    VERB,
    OpenRollouts,
    Training,
    TrainingInputs,
    open_pivot_training,
    open_task_training,
    train_policy,
)
from harness1.sft.collect import open_runs, student_place, tasks_of_runs
from harness1.training.log import Trackers, clear_training
from harness1.training.process_group import ALONE, ProcessGroup
from harness1.viewer.report import ensure_report

JudgeModel = Annotated[str, Option(help="A model that looks for tricks.", metavar="openai:MODEL@URL|hf:PATH")]
JudgedRun = Annotated[Path | None, Option(help="With --judge: read this run, not the check's own.", metavar="RUN")]
Judged = Annotated[int, Option(help="With --judge: about this many episodes.", min=1)]
SHOWN = "reward", "loss", "curated_recall", "set_size", "turns", "entropy", "k3", "gate/mean_k3"
"""The values shown for batches, and for validations."""
EASY = 0.9  # share of the oracle's gain from which nothing is left to learn


def check(
    dataset: options.DatasetName,
    split: Annotated[str, Option(help="The split to take tasks from; default train, dev or the only one.")] = "",
    tokenizer: Annotated[str, Option(help="The student's model; its tokenizer counts contexts.", metavar="PATH")] = "",
    share: options.ShareOf = "",
    against: options.Against = None,
    exclude: options.Exclude = None,
    limit: options.Limit = 0,
    seed: options.Seed = 0,
    index: options.IndexSpec = None,
    out: Annotated[Path | None, Option(help="Report folder; default runs/DATASET-SPLIT-check.", metavar="RUN")] = None,
    cache: options.Cache = None,
    judge: JudgeModel = "",
    run: JudgedRun = None,
    judged: Judged = 20,
    tools: options.Tools = None,
    rewards: options.Rewards = None,
    easy: Annotated[float, Option(help="Score of a policy that does not think from which to refuse; 1: never.")] = EASY,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Play policies that should earn nothing, little or everything on a task set, and judge each task by the rewards.
    The same command resumes a stopped check.

    A judge reads the best-paid episodes of every policy but the oracle, or those of --run (a run, or a training). Its
    replies are kept in judge.jsonl of its folder. Exit code 1 if a policy that does not think reaches --easy.

    Example: harness1 rl check world:1000 --limit 50 --out runs/check --config rl/small"""
    settings = resolve(config, overrides, tokenizer, tools=tools, rewards=rewards)
    if run is not None and not judge:
        raise UsageError("--run names the episodes that a judge reads: give --judge too")
    reviewer = open_completer(judge, settings, MOST_TOKENS) if judge else None
    source = open_source(dataset := place_of(dataset, settings))
    split = split or source.training_split()
    apart = evaluation_places(against, settings), tasks_of_runs(exclude or ())
    tasks, selection = checking.tasks_to_check(source, split, limit, settings.data, share, *apart)
    say_left_out(*([selection] if selection else []))
    out = out or Path("runs") / f"{source.name.replace(':', '-')}-{split}-check"
    student = student_place(tokenizer, source, tasks, settings) if tokenizer else ""
    place = index_of(source, index, cache, settings, read_aloud, say)
    job = Evaluation(dataset, split, tasks, place, checking.ORACLE, settings, seed=seed, student=student)
    report = _check(job, selection, out, force=force)
    if reviewer is None:
        print_result(report, as_json, print_report, out)
    else:
        found = judge_runs(reviewer, judge, run, tasks, judged, out, force=force)
        whole = msgspec.to_builtins(report) | {"judge": msgspec.to_builtins(found)}
        print_result(whole, as_json, lambda _: print_report(report, out))
        if not as_json:
            print_findings(found)
    best = report.easiest
    if easy != 1.0 and best.score >= easy:
        say(
            f"TOO EASY: {best.policy}, which does not think, earns {best.reward:.3f}, {best.score:.0%} of what the"
            " oracle gains over doing nothing. There is nothing to learn: take harder tasks, or a reward that tells"
            " them apart; --easy 1 goes on"
        )
        raise typer.Exit(1)


def print_report(report: checking.AdmissionReport, out: Path) -> None:
    """Print the rewards of the policies with their largest terms, and the number of admitted tasks."""
    put(f"{report.dataset}/{report.split}, reward {report.recipe}")
    print_table(checking.COLUMNS, [each.list_cells() for each in report.policies], range(1, 6))
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.reasons.items()) or "none"
    put(f"{len(report.tasks)} tasks, {len(report.list_admitted())} admitted; rejected for: {reasons}.")
    bound = checking.HEADROOM
    put(f"{len(report.list_admitted(bound))} of them have headroom of at least {bound:g}.")
    right, differing = report.ranked
    put(f"In order ({' > '.join(checking.ORDER)}) on {right} of {differing} tasks where recalls differ.")
    put(f"Everything is in {out}.")


def _check(job: Evaluation, selection: Selection | None, out: Path, *, force: bool) -> checking.AdmissionReport:
    """Check under a bar that counts the episodes of all policies."""
    with progress_of_work() as progress:
        bar = progress.add_task("", total=(len(checking.POLICIES) + 1) * len(job.tasks))  # one policy plays twice

        def start(policy: str, finished: int, _total: int) -> None:
            progress.update(bar, description=f"{policy} on {job.dataset}", advance=finished)

        told: dict[str, Any] = {"on_policy": start, "on_episode": lambda _: progress.advance(bar)}
        found = checking.check(job, out, selection, force=force, **told)
    for policy in checking.POLICIES:
        ensure_report(out / checking.RUNS / policy, job.tasks)
    return found


def judge_runs(
    judge: Completing, name: str, run: Path | None, tasks: Sequence[Task], count: int, out: Path, *, force: bool
) -> RedTeamReport:
    """Have about `count` of the best-paid episodes judged, under a bar: those of a run, of a training, or of the check
    itself. `tasks`: those whose gold is known. `force`: ask again. Raise as `best_paid` and `review`."""
    golds = {task.task_id: task.gold for task in tasks if task.gold is not None}
    folders = [out / checking.RUNS / policy for policy in checking.POLICIES if policy != checking.ORACLE]
    if run is not None:
        folders = [run / EPISODES if (run / EPISODES).is_dir() else run]
    if force:
        (out / REPLIES).unlink(missing_ok=True)
    paid = best_paid(folders, count, golds)
    with progress_of_work() as progress:
        bar = progress.add_task(f"{name} judges", total=len(paid))
        return review(paid, name, judge, out, lambda: progress.advance(bar))


def print_findings(found: RedTeamReport) -> None:
    """Print what a judge found, and what it cost."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kinds.items())) or "none"
    put(
        f"{found.judge} read {found.episodes} well-paid episodes: {found.honest} honest, {found.tricks} with a trick"
        f" ({kinds}), {found.invalid} replies that cannot be checked, {found.missing} missing."
    )
    for each in found.findings:
        place = f"{Path(each.run).name}, task {each.task_id}, reward {each.reward:.3f}, turn {each.turn}"
        put(f"  {each.kind}: {place}: {each.quote!r}")
    for fault in found.faults:
        put(f"  missing: {fault}")
    put(f"The judge read {found.prompt_tokens:,} tokens and wrote {found.output_tokens:,}.")


def pivots(
    run: Annotated[Path, Argument(help="A run folder of `harness1 sft collect`.", metavar="SFT_RUN")],
    out: Annotated[Path, Option(help="Folder for the profile.", metavar="PIVOTS")],
    policy: Annotated[str, Option("--policy", "--model", help=f"The frozen policy: {POLICY_NAMES}.", metavar="SPEC")],
    index: options.IndexSpec = None,
    against: options.Against = None,
    exclude: options.Exclude = None,
    engine: options.EngineOption = "",
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Try every turn of a teacher with a reference policy, and keep those that it sometimes gets right. States are
    rebuilt by replay; the environment is that of the run. The same command resumes a stopped profile.

    Example: harness1 rl pivots runs/teacher --out pivots --policy hf:student"""
    settings = resolve(config, overrides)
    if needs_gold(policy):
        raise UsageError(f"{policy} sees the gold: profile with the policy that is to be trained")
    check_policy(policy, settings)
    taught = open_runs([run], rerendered=True)[0]
    settings = msgspec.structs.replace(settings, env=taught.config.env, index=taught.config.index)
    apart = evaluation_places(against, settings), tasks_of_runs(exclude or ())
    if engine:  # the reference is sampled there, as it is in training
        sampler = open_start(engine, resolve_model(ModelSpec.read(policy).model), settings)
        reference: Policy = open_policy_to_train(policy, settings, sampler)
    else:
        reference = open_policy(policy, {}, settings)
    work = Profile(taught, reference, policy, settings, index or "", *apart)
    say_left_out(work.selection)
    with progress_of_work() as progress:
        bar = progress.add_task(f"{policy} on turns of {run}", total=None)

        def show(done: int, of: int) -> None:
            progress.update(bar, completed=done, total=of)

        found = profile(work, out, force=force, on_torn=partial(say_torn, run), on_pivot=show)
    print_result(found, as_json, _print_profile, policy, out)


def _print_profile(found: dict[str, dict[str, Any]], policy: str, out: Path) -> None:
    put(f"Turns tried by {policy}")
    heads = ("expert's tool", *(name.replace("_", " ") for name in found["fates"]["all"]))
    print_table(heads, [(name, *map(str, fates.values())) for name, fates in found["fates"].items()])
    splits = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found["splits"].items()) or "none"
    put(f"kept: {splits}. Everything is in {out}.")


def train(
    model: Annotated[str, Option(help="hf:PATH, vllm:PATH, vllm:MODEL@URL or sglang:MODEL@URL.", metavar="SPEC")],
    out: Annotated[Path, Option(help="Folder for the checkpoint.", metavar="CHECKPOINT")],
    data: Annotated[list[str] | None, Option(help="A dataset to learn from; repeatable.", metavar="DATASET")] = None,
    split: Annotated[str, Option(help="The split to take tasks from.")] = "train",
    index: Annotated[list[str] | None, Option(help="An index for each dataset, in order.", metavar="SPEC")] = None,
    admission: Annotated[list[str] | None, Option(help="The `rl check` report of each dataset, in order.")] = None,
    share: options.ShareOf = "",
    against: options.Against = None,
    exclude: options.Exclude = None,
    pivots: Annotated[Path | None, Option(help="Train on turns of a profile, not --data.", metavar="PIVOTS")] = None,
    engine: options.EngineOption = "",
    cache: options.Cache = None,
    tensorboard: options.Tensorboard = False,
    wandb: options.Wandb = "",
    ends_at: options.EndsAt = math.inf,
    tools: options.Tools = None,
    rewards: options.Rewards = None,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Train a policy on its own episodes; a stopped training run resumes from its last saved state.

    On several GPUs: torchrun --nproc-per-node 8 -m harness1 rl train ...

    Example: harness1 rl train --config rl/small --data world:1000 --model hf:student --out better"""
    with lead_group() as group:
        if group is None:
            return
        settings = resolve(config, overrides, model, tools=tools, rewards=rewards)
        if bool(data) == (pivots is not None):
            raise UsageError("give either --data or --pivots")
        service = None
        if engine:
            service = open_service(engine, resolve_model(ModelSpec.read(model).model), settings, group.size)
        else:
            refuse_oversized_rl(settings, model, group.size)
        policy = open_policy_to_train(model, settings, service and service.sampler)
        inputs = _inputs(settings, data or (), model, split, share, against, exclude, index or (), admission or ())
        if pivots is None:
            find_index = partial(index_of, cache=cache, config=settings, read=read_aloud, say=say)
            work, players = open_task_training(settings, inputs, out, policy, find_index)
        else:
            work, players = open_pivot_training(settings, inputs, out, policy, pivots)
        alone = reserve_devices(policy.model, settings, work.device, group.size)
        logs = Trackers(tensorboard, wandb)
        trainer = partial(open_service_engine, service, settings) if service is not None else work.open_engine
        work = replace(work, trackers=logs, undisturbed=alone, ends_at=ends_at, open_engine=trainer)
        _carry_out(work, players, policy, group, force, as_json)


def _inputs(
    settings: Config,
    data: Sequence[str],
    model: str,
    split: str,
    share: ShareName,
    against: Sequence[str] | None,
    exclude: Sequence[Path] | None,
    index: Sequence[str] = (),
    admission: Sequence[str] = (),
) -> TrainingInputs:
    return TrainingInputs(
        data=tuple(place_of(each, settings) for each in data),
        model=model,
        split=split,
        index=tuple(index),
        admission=tuple(admission),
        share=share,
        against=evaluation_places(against, settings),
        exclude=tuple(map(str, exclude or ())),
    )


def train_aloud(work: Training, players: OpenRollouts, policy: LanguageModelPolicy, group: ProcessGroup) -> Checkpoint:
    """Train, and show the progress; raise as `train_policy`."""
    with TrainingBoard(work.out.name, "batch", SHOWN) as board:
        return train_policy(work, players, policy.counter, policy.hash, board.listen, group)


def _carry_out(
    work: Training, players: OpenRollouts, policy: LanguageModelPolicy, group: ProcessGroup, force: bool, as_json: bool
) -> None:
    say_left_out(*work.selections)
    if force:
        work.check()  # nothing is deleted if the training is refused
        clear_training(work.out, VERB)
    done = read_checkpoint(work.out) if work.is_done(policy.hash) else None
    print_checkpoint(done or train_aloud(work, players, policy, group), work.out, "batch", as_json)


def agents(
    command: Annotated[str, Option(help="The agent's command with {query}, {task_id}, {base_url}.", metavar="COMMAND")],
    data: Annotated[list[str], Option(help="A dataset of tasks, by name or path; repeatable.", metavar="DATASET")],
    upstream: Annotated[str, Option(help="hf:PATH, vllm:PATH, vllm:MODEL@URL or sglang:MODEL@URL.", metavar="SPEC")],
    evaluate: Annotated[str, Option(help="What scores a session: MODULE:NAME or FILE.py:NAME.", metavar="FUNCTION")],
    out: Annotated[Path, Option(help="Folder for the checkpoint.", metavar="CHECKPOINT")],
    env: Annotated[list[str] | None, Option(help="A variable that agents inherit; repeatable.", metavar="NAME")] = None,
    sandbox: Annotated[bool, Option(help="Keep agents apart; without it, the command must.")] = True,
    split: Annotated[str, Option(help="The split to take tasks from.")] = "train",
    share: options.ShareOf = "",
    against: options.Against = None,
    exclude: options.Exclude = None,
    tensorboard: options.Tensorboard = False,
    wandb: options.Wandb = "",
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Train the model behind an agent of any kind: a command for each task, its calls recorded, its work scored.

    The agent finds the model through OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY,
    and its task in task.json in its working folder. It is played machine.concurrency times at once, each for
    machine.episode_deadline_s at most, apart from the others as far as this machine permits.

    Example: harness1 rl agents --command "python agent.py" --data world:1000 --upstream hf:student \\
        --evaluate harness1.agents.evaluation:delivered_f1 --config rl/small --out better"""
    with optional("serve"):  # not above: the help of this verb needs no extra
        from harness1.agents.training import open_agent_training

    inherited = inherit(os.environ, env or ())
    settings = resolve(config, overrides, upstream)
    refuse_oversized_rl(settings, upstream, 1)
    policy = open_policy_to_train(upstream, settings)
    inputs = _inputs(settings, data, upstream, split, share, against, exclude)
    kept = Sandbox(limited=False)
    if sandbox:
        needed = needed_paths(arguments_of(command, {}), inherited)
        closed = closed_paths(out, map(from_anywhere, inputs.data), evaluate, Path.home(), needed)
        kept = asyncio.run(find_sandbox(closed, needed))
    work, players = open_agent_training(settings, inputs, out, policy, command, evaluate, inherited, kept)
    say(kept.describe())
    alone = reserve_devices(policy.model, settings, work.device, 1)
    work = replace(work, trackers=Trackers(tensorboard, wandb), undisturbed=alone)
    with interrupt_by_sigterm():
        _carry_out(work, players, policy, ALONE, force, as_json)


@contextmanager
def interrupt_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end what is within, once, as Ctrl-C does, also where that is ignored: behind a script."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
