"""A recorded run read back: its card and settings, its tasks with their gold, its episodes, and each task's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec

from harness1.config import Config
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.eval.metrics import task_metrics
from harness1.plain import digest
from harness1.records import Episode, EpisodeKey, Faults, Gold, Task
from harness1.runs.files import Stage
from harness1.runs.folder import episodes_of, read_run_card, run_config
from harness1.runs.journal import read_episodes

SCORING = ("gold", "reward")
"""Inputs of a run that decide its scores, and not its episodes unless its policy sees the gold."""
SCORE_AGAIN = "`harness1 eval` with --rescore scores its episodes again without playing"
UNFUSED = ("reward", "auto_populated_kept")  # a fused run lacks them: they do not add up over rollouts
SHOWN = 60  # characters of a question that a message shows

PerTask = Mapping[str, Mapping[str, float]]  # the mean of every metric over the samples of each scored task
TaskKey = tuple[str, str]  # id and question of a task; several datasets may use one id


@dataclass(eq=False)
class Run:
    """A run folder. Datasets and episodes are read when they are first asked for; a worker process gets the gold, and
    not the rest. `moved`: the current location of its dataset; "": the recorded one. `given`: its tasks with gold, and
    `played`: its episodes, if the caller has them."""

    folder: Path
    stage: Stage
    moved: str = ""
    given: Sequence[Task] | None = None
    played: Mapping[EpisodeKey, Episode] | None = None

    @classmethod
    def open(cls, folder: Path, moved: str = "", given: Sequence[Task] | None = None) -> Self:
        """Open the folder of any run, be it an evaluation, a search or a training; raises as `read_run_card`."""
        stage = read_run_card(folder)
        run_config(folder, stage)
        return cls(folder, stage, moved, given)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("folder", "stage", "moved", "given", "played", "known_gold")
        return {name: self.__dict__[name] for name in kept if name in self.__dict__}

    @cached_property
    def config(self) -> Config:
        return run_config(self.folder, self.stage)[0]

    @property
    def index(self) -> str:
        return str(self.stage.outputs["index"])

    @property
    def policy(self) -> str:
        return str(self.stage.outputs.get("policy", ""))

    @property
    def datasets(self) -> list[str]:
        """Where its datasets are, or were when it was made; "" for one that its card does not name."""
        outputs, inputs = self.stage.outputs, self.stage.inputs
        named = outputs.get("datasets") or [self.moved or outputs.get("source") or inputs.get("dataset")]
        return [str(place or "") for place in named]

    @property
    def dataset(self) -> str:
        """Location of the dataset when the run was made."""
        return str(self.stage.outputs.get("source", self.stage.inputs.get("dataset", "")))

    @property
    def split(self) -> str:
        """The split of its tasks; "" where somebody asked its questions, one by one."""
        return str(self.stage.inputs.get("split") or self.stage.outputs.get("split") or "")

    @property
    def faults(self) -> Faults:
        """How episodes that the infrastructure broke count in its means."""
        return "zero" if self.stage.outputs.get("faults") == "zero" else "exclude"

    @cached_property
    def sources(self) -> list[Source]:
        """Its datasets, opened. Raises UsageError: one cannot be opened."""
        return [open_source(place) for place in self.datasets]

    @property
    def secret_answers(self) -> bool:
        """True if its answers must not be written anywhere; also where the caller gave the tasks."""
        return self.given is not None or any(source.secret_answers for source in self.sources)

    @cached_property
    def split_tasks(self) -> dict[str, Task]:
        """Every task of its split by id, with gold, played or not. Raises UsageError: there is no such split."""
        if self.given is not None:
            return {task.task_id: task for task in self.given}
        return {task.task_id: task for source in self.sources for task in source.tasks(self.split)}

    @cached_property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks that its card names, or all of its split, by id. Raises UsageError: the dataset lacks one."""
        if self.given is not None or "tasks" not in self.stage.inputs:
            return self.split_tasks
        try:
            known = self.split_tasks
        except UsageError as error:
            way_out = "if it was moved, give its new location with --dataset"
            raise UsageError(f"the dataset of {self.folder} cannot be read: {error}; {way_out}") from error
        if absent := [task_id for task_id in self.stage.inputs["tasks"] if task_id not in known]:
            other = f"{self.datasets[0]} is not what {self.folder} was run on"
            raise UsageError(f"{other}: split {self.split} has no task {absent[0]!r}")
        return {task_id: known[task_id] for task_id in self.stage.inputs["tasks"]}

    @property
    def task_names(self) -> list[tuple[str, str]]:
        """The dataset and id of each task to play, or that a training played, for all datasets of a mixture."""
        if (asked := self.stage.inputs.get("tasks")) is None:
            asked = sorted({episode.task.task_id for episode in read_episodes(self.folder)})
        return [(source.name, str(task)) for source in self.sources for task in asked]

    @cached_property
    def episodes(self) -> Mapping[EpisodeKey, Episode]:
        """The last episode of each key, of those that its card describes."""
        if self.played is not None:
            return self.played
        return {each.key: each for each in episodes_of(self.stage, self.folder)}

    @cached_property
    def samples(self) -> Mapping[str, list[Episode]]:
        """The episodes of each task that has one, in the order of their samples."""
        groups: dict[str, list[Episode]] = {}
        for episode in sorted(self.episodes.values(), key=lambda episode: episode.sample_idx):
            groups.setdefault(episode.task.task_id, []).append(episode)
        return groups

    @cached_property
    def per_task(self) -> PerTask:
        """The metrics of each scored task (see `metrics.task_metrics`)."""
        episodes, finished = self.episodes.values(), self.stage.status == "finished"
        found = task_metrics(episodes, self.tasks, self.config, finished=finished, faults=self.faults)
        return self.with_rollout_costs(found)

    def with_rollout_costs(self, found: PerTask) -> PerTask:
        """Return metrics as they are, or with the costs of its rollouts from the card of a fused run."""
        if (taken := self.stage.outputs.get("taken")) is None:
            return found
        kept = {task_id: {name: row[name] for name in row if name not in UNFUSED} for task_id, row in found.items()}
        return {task_id: row | taken.get(task_id, {}) for task_id, row in kept.items()}

    def gold_of(self, task: Task) -> Gold | None:
        """Return the gold of a recorded task without secret answers; None if its dataset does not tell."""
        return self.known_gold[0].get((task.task_id, task.query))

    @cached_property
    def known_gold(self) -> tuple[dict[TaskKey, Gold], list[str]]:
        """The gold of its tasks without secret answers, and lines that say what is missing or has changed."""
        if not self.split or not all(self.datasets):
            return {}, ["Its card names no dataset and split: there are no gold marks and no recall."]
        try:
            tasks = [(source, task) for source in self.sources for task in source.tasks(self.split)]
        except (UsageError, OSError) as error:
            return {}, [f"Its dataset cannot be opened ({error}): there are no gold marks and no recall."]
        played, notes = self.stage.inputs.get("tasks"), []
        if played is not None and self._has_other_gold({task.task_id: task for _, task in tasks}):
            notes = ["Its gold has changed since it was scored: marks and recall are of the new gold, rewards are not."]
        wanted = None if played is None else set(played)
        golds = {}
        for source, task in tasks:
            if task.gold is not None and (wanted is None or task.task_id in wanted):
                hidden = {"answers": ()} if source.secret_answers else {}
                golds[task.task_id, task.query] = msgspec.structs.replace(task.gold, **hidden)
        return golds, notes

    def refuse_other_queries(self, way_out: str) -> None:
        """Accept only the questions that the run asked, by the hash in its card and by its episodes. `way_out`: what
        the user can do. Raises UsageError: a question has changed; the message names the first such task."""
        recorded = self.stage.inputs.get("queries")
        if recorded is not None and recorded == self._hash("queries", self.tasks):
            return
        for asked in (episode.task for episode in self.episodes.values()):
            now = self.tasks.get(asked.task_id)
            if now is not None and now.query != asked.query:
                both = f"it asked {asked.query[:SHOWN]!r}, and the dataset asks {now.query[:SHOWN]!r}"
                raise UsageError(f"task {asked.task_id!r} has changed since {self.folder} was run: {both}: {way_out}")
        if recorded is not None:
            raise UsageError(f"questions of tasks that {self.folder} has not played have changed: {way_out}")

    def refuse_other_gold(self, way_out: str) -> None:
        """Raise UsageError if the gold is not what the run was scored with, as far as its card tells."""
        if self._has_other_gold(self.split_tasks):
            raise UsageError(f"{self.folder} was scored with other gold than its dataset has now: {way_out}")

    def _has_other_gold(self, tasks: Mapping[str, Task]) -> bool:
        return "gold" in self.stage.inputs and self.stage.inputs["gold"] != self._hash("gold", tasks)

    def _hash(self, name: str, tasks: Mapping[str, Task]) -> str:
        return task_hashes([tasks[task_id] for task_id in self.stage.inputs["tasks"] if task_id in tasks])[name]


def read_run(folder: Path, dataset: str | None = None, tasks: Iterable[Task] | None = None) -> Run:
    """Read the run folder of an evaluation, finished or not, as a whole. `dataset`, `tasks`: as `moved`, `given` of
    `Run`. Raises UsageError: it is no evaluation, its dataset has moved or changed, or an episode has no score."""
    run = Run.open(folder, dataset or "", None if tasks is None else list(tasks))
    if not {"dataset", "split", "tasks"} <= run.stage.inputs.keys():
        raise UsageError(f"{folder} is not an evaluation: its card names no dataset with tasks")
    run.refuse_other_queries("a run is read with the tasks it was played on")
    fused = "the version that fused it can fuse its runs again"
    run.refuse_other_gold(fused if "fused" in run.stage.inputs else SCORE_AGAIN)
    assert run.per_task is not None
    return run


def task_hashes(tasks: Sequence[Task]) -> dict[str, str]:
    """Return the hash of the questions of tasks, and that of their gold, as a card records them."""
    return {
        "queries": digest([[task.task_id, task.query, task.split] for task in tasks]),
        "gold": digest([[task.task_id, task.gold] for task in tasks]),
    }
