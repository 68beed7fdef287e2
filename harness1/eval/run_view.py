"""An evaluation read back: its settings, its tasks with their gold, its episodes, and the metrics of each task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from harness1.config import Config
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.eval.failure import Faults
from harness1.eval.scored_with import SCORE_AGAIN, refuse_other_gold, refuse_other_queries
from harness1.eval.summary import task_metrics
from harness1.records import Episode, EpisodeKey, Task
from harness1.runs.folder import episodes_of, run_config
from harness1.runs.stage import Stage, read_stage

Value = TypeVar("Value")

UNFUSED = frozenset({"reward", "auto_populated_kept"})
"""Metrics of single turns. A fused run lacks them: its episodes have no turns, and they do not add up over rollouts."""


@dataclass(frozen=True)
class RunView:
    """A run folder as a value."""

    folder: Path
    stage: Stage
    config: Config
    index: str
    """The index that answered, by its absolute path."""
    tasks: Mapping[str, Task]
    """Every task of the run by id, with gold, whether or not it has an episode."""
    episodes: Mapping[EpisodeKey, Episode]
    """The last episode of each key."""
    per_task: Mapping[str, Mapping[str, float]]
    """The mean of every metric over the samples of each scored task (see `summary.task_metrics`)."""
    secret_answers: bool = False
    """True if the answers of its dataset must not be written anywhere."""

    @property
    def policy(self) -> str:
        return str(self.stage.outputs["policy"])

    @property
    def dataset(self) -> str:
        """Location of the dataset when the run was made."""
        return str(self.stage.outputs.get("source", self.stage.inputs["dataset"]))

    @property
    def split(self) -> str:
        return str(self.stage.inputs["split"])

    @property
    def faults(self) -> Faults:
        """How episodes that the infrastructure broke count in its means."""
        return faults_of(self.stage)

    def samples(self, task_id: str) -> list[Episode]:
        """Return the episodes of one task, in the order of their samples."""
        return self._by_task.get(task_id, [])

    @cached_property
    def _by_task(self) -> dict[str, list[Episode]]:
        groups: dict[str, list[Episode]] = {}
        for episode in sorted(self.episodes.values(), key=lambda episode: episode.sample_idx):
            groups.setdefault(episode.task.task_id, []).append(episode)
        return groups

    def with_episodes(self, episodes: Mapping[EpisodeKey, Episode]) -> RunView:
        """Return the same run with other episodes."""
        return replace(self, episodes=episodes, per_task=_measured(episodes, self.tasks, self.config, self.stage))


def read_run(folder: Path, dataset: str | None = None, tasks: Iterable[Task] | None = None) -> RunView:
    """Read the run folder of an evaluation, finished or not.

    Args:
        dataset: the current location of its dataset, as for `open_source`; None: the recorded one.
        tasks: the tasks of its split with gold, if the caller has them: the dataset is then not opened, and its answers
            count as secret.

    Raises:
        UsageError: the folder is not an evaluation, its dataset has moved or lacks a task of the run, questions or gold
            have changed since, or an episode cannot be scored.
        SchemaError: its card or an episode is damaged.
    """
    config, index = run_config(folder)
    stage = read_stage(folder)
    if stage is None or not {"dataset", "split", "tasks"} <= stage.inputs.keys():
        raise UsageError(f"{folder} is not an evaluation: its card names no dataset with tasks")
    known, secret = _tasks(folder, stage, dataset) if tasks is None else ({task.task_id: task for task in tasks}, True)
    episodes = {episode.key: episode for episode in episodes_of(stage, folder)}
    refuse_other_queries(stage, folder, known, episodes.values(), "a run is read with the tasks it was played on")
    fused = "fused" in stage.inputs
    refuse_other_gold(stage, folder, known, "fuse its runs again" if fused else SCORE_AGAIN)
    measured = _measured(episodes, known, config, stage)
    return RunView(folder, stage, config, index, known, episodes, measured, secret)


def faults_of(stage: Stage) -> Faults:
    """Return how broken episodes count in the means of a run, by its card."""
    return "zero" if stage.outputs.get("faults") == "zero" else "exclude"


def fused_metrics(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Return the metrics that a fused run has."""
    return {name: value for name, value in metrics.items() if name not in UNFUSED}


def refuse_other_dataset(first: RunView, second: RunView) -> None:
    """Refuse to compare runs of different tasks. A dataset may have different locations, under the same name.

    Raises:
        UsageError: the dataset or split differs, or the same id names different tasks in the two runs.
    """
    (name, split), (other_name, other_split) = ((Path(run.dataset).name, run.split) for run in (first, second))
    if (name, split) != (other_name, other_split):
        raise UsageError(
            f"{first.folder} was run on {name}/{split} and {second.folder} on {other_name}/{other_split}: they have no"
            " tasks in common"
        )
    for task_id in first.tasks.keys() & second.tasks.keys():
        if first.tasks[task_id] != second.tasks[task_id]:
            raise UsageError(f"task {task_id!r} of {first.folder} is a different task in {second.folder}")


def _tasks(folder: Path, stage: Stage, dataset: str | None) -> tuple[dict[str, Task], bool]:
    """Return the tasks that the card names, from the dataset, and whether their answers are secret."""
    place = dataset or str(stage.outputs.get("source", stage.inputs["dataset"]))
    try:
        source = open_source(place)
        known = {task.task_id: task for task in source.tasks(stage.inputs["split"])}
    except UsageError as error:
        raise UsageError(
            f"the dataset of {folder} cannot be read: {error}; if it was moved, give its new location with --dataset"
        ) from error
    if absent := [task_id for task_id in stage.inputs["tasks"] if task_id not in known]:
        raise UsageError(
            f"{place} is not what {folder} was run on: split {stage.inputs['split']} has no task {absent[0]!r}"
        )
    return {task_id: known[task_id] for task_id in stage.inputs["tasks"]}, source.secret_answers


def _measured(
    episodes: Mapping[EpisodeKey, Episode], tasks: Mapping[str, Task], config: Config, stage: Stage
) -> dict[str, dict[str, float]]:
    """Return per-task metrics; a fused run has the costs of its rollouts, from its card, in place of its episodes'."""
    finished, faults = stage.status == "finished", faults_of(stage)
    found = task_metrics(episodes.values(), tasks, config, finished=finished, faults=faults)
    if (taken := stage.outputs.get("taken")) is None:
        return found
    return {task_id: fused_metrics(metrics) | taken.get(task_id, {}) for task_id, metrics in found.items()}
