"""Open a finished profile to train the policy that it was made with, on the turns that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from harness1.config import Config
from harness1.config.settings import differences
from harness1.data.leaks import Selection
from harness1.errors import ConfigError, UsageError
from harness1.policy.policy import Policy
from harness1.records import Task
from harness1.rl.pivots.pivot import Pivot, Split, read_pivots
from harness1.rl.pivots.profile import VERB, LeaveOut, Profile, hashes_of, named_settings
from harness1.rl.pivots.rollouts import PivotRollouts, Publish
from harness1.runs.files import Stage, read_stage
from harness1.runs.journal import latest_episodes
from harness1.sft.teacher_run import TeacherRun, open_runs


@dataclass(frozen=True)
class PivotTraining:
    """Tasks that have the names of turns, and the rollouts that play them."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    rollouts: PivotRollouts
    selection: Selection
    """The choice among the tasks of the teacher's run."""


def open_training(
    folder: Path,
    policy: Policy,
    config: Config,
    publish: Publish,
    index: str = "",
    *,
    every: bool = False,
    leave_out: LeaveOut | None = None,
) -> PivotTraining:
    """Open the profile in `folder`.

    Args:
        config: with the settings of the profile, including those of the environment.
        publish: gives new weights to the policy.
        index: the place of the index, if it has moved.
        every: for comparison, take all candidates that were sampled, not only the kept ones.
        leave_out: tasks that are not learned from, even if they were profiled.

    Raises:
        UsageError: the folder holds no finished profile, or its run is gone.
        ConfigError: the reference weights or the configuration differ from those of the profile.
    """
    stage = read_stage(folder)
    if stage is None or stage.verb != VERB or stage.status != "finished":
        raise UsageError(f"{folder} holds no finished profile: make one with `harness1 {VERB}`")
    run = open_runs([Path(stage.outputs["run"])], rerendered=True)[0]
    check_profile(stage, folder, policy, run, config)
    work = Profile(run, policy, policy.name, config, index or stage.outputs["index"], leave_out or LeaveOut())
    sampled = [each for each in read_pivots(folder) if each.fate == "kept" or (every and each.samples)]
    selection = chosen_tasks(work, sampled)
    learned = {*selection.learned, *selection.held_out}
    chosen = [each for each in sampled if each.task_id in learned]
    wanted = {each.episode_id for each in chosen}
    found = {each.episode_id: each for each in latest_episodes(run.folder).values() if each.episode_id in wanted}
    if missing := wanted - found.keys():
        raise UsageError(f"{run.folder} no longer has episode {min(missing)}: profile it again")
    tasks = [Task(each.turn_id.name, found[each.episode_id].task.query, each.split) for each in chosen]
    train, held_out = (tuple(task for task in tasks if task.split == split) for split in get_args(Split))
    return PivotTraining(train, held_out, PivotRollouts(work.world(), policy, found, run.golds, publish), selection)


def chosen_tasks(work: Profile, pivots: Sequence[Pivot]) -> Selection:
    """Return the choice of the profile's tasks: those with turns to learn from give away no validation task."""
    by_split = {split: {each.task_id for each in pivots if each.split == split} for split in get_args(Split)}
    allowed = work.selection.learned
    train, held_out = ([work.run.tasks[name] for name in allowed if name in by_split[each]] for each in get_args(Split))
    left = work.sieve.beside(held_out, work.run.source.name, train)
    return msgspec.structs.replace(
        work.selection,
        held_out=tuple(task.task_id for task in held_out),
        beside=len(train) - len(left),
        learned=tuple(task.task_id for task in left),
    )


def check_profile(stage: Stage, folder: Path, policy: Policy, run: TeacherRun, config: Config) -> None:
    """Refuse a profile of another policy, because turns with mixed outcomes for one are easy or hopeless for another.

    Raises:
        ConfigError: they differ; the message names the differences.
    """
    now, then = hashes_of(policy, run), stage.hashes
    ours, theirs = named_settings(config.env, config), stage.outputs["settings"]
    wrong = [name for name, known in now.items() if then.get(name) != known]
    if not wrong and all(ours[group] == theirs[group] for group in ("env", "pivots")):
        return
    named = [f"{name}={mine} (profiled: {other})" for name, mine, other in differences(ours, theirs)]
    named += [f"the {name}" for name in wrong if name in ("weights", "format", "index", "rules")]
    raise ConfigError(
        f"the profile in {folder} was made with {stage.outputs['policy']} and is valid only for it; these differ:"
        f" {', '.join(named or wrong)}. Profile again with `harness1 {VERB}`"
    )
