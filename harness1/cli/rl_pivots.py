"""harness1 rl pivots: find the turns of a teacher from which a policy can learn."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

from harness1.cli.bars import progress_of_work
from harness1.cli.datasets import evaluation_places
from harness1.cli.options import Against, ConfigFile, EngineOption, Exclude, Force, IndexSpec, Json, Overrides, resolve
from harness1.cli.policies import POLICIES
from harness1.cli.printing import print_result, say_left_out, say_torn
from harness1.cli.results import headed
from harness1.cli.terminal import Terminal
from harness1.config import Config
from harness1.engines.open import open_start
from harness1.errors import UsageError
from harness1.models.fetch import resolve_model
from harness1.models.spec import ModelSpec
from harness1.policy.policy import Policy
from harness1.policy.registry import check_policy, needs_gold, open_policy
from harness1.rl.pivots import LeaveOut, Profile, profile
from harness1.rl.rollouts import open_policy_to_train
from harness1.sft.collect import open_runs, tasks_of_runs


def pivots(
    run: Annotated[Path, Argument(help="A run folder of `harness1 sft collect`.", metavar="SFT_RUN")],
    out: Annotated[Path, Option(help="Folder for the profile.", metavar="PIVOTS")],
    policy: Annotated[
        str,
        Option(
            "--policy",
            "--model",
            help="The frozen reference, from which training will begin; default machine.learn.model of the"
            f" configuration: {POLICIES}.",
            metavar="SPEC",
        ),
    ] = "",
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

    Example: harness1 rl pivots runs/teacher --out pivots --policy hf:student --set rl.pivots.samples=8
    """
    settings = resolve(config, overrides)
    if not (policy := policy or settings.machine.learn.model):
        raise UsageError("give --policy, or machine.learn.model in the configuration")
    if needs_gold(policy):
        raise UsageError(f"{policy} sees the gold: profile with the policy that is to be trained")
    check_policy(policy, settings)
    taught = open_runs([run], rerendered=True)[0]
    settings = msgspec.structs.replace(settings, env=taught.config.env, index=taught.config.index)
    leave_out = LeaveOut(evaluation_places(against, settings), tasks_of_runs(exclude or ()))
    work = Profile(taught, _reference(policy, engine, settings), policy, settings, index or "", leave_out)
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
    table = headed("expert's tool", *fates_of_all)
    for name, fates in found["fates"].items():
        table.add_row(name, *map(str, fates.values()))
    console = Terminal()
    console.print(f"Turns tried by {policy}", soft_wrap=True)
    console.print(table)
    splits = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found["splits"].items()) or "none"
    console.print(f"kept: {splits}. Everything is in {out}.")
