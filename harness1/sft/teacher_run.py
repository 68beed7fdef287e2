"""Run folders as inputs of a dataset: opened and checked for consistency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness1.config import Config
from harness1.config.settings import differences
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.env.pieces import ApproximateCounter
from harness1.errors import SchemaError, UsageError
from harness1.eval.run import Run
from harness1.models.tokenizer import Tokenizer
from harness1.records import Episode, Gold, Status, Task
from harness1.runs.files import STAGE, Stage, read_stage
from harness1.runs.folder import run_config
from harness1.sft.collect import check_round_trip, check_taught_split, sample_texts
from harness1.sft.data_card import CollectionRun
from harness1.sft.rows import Origin, has_token_ids

_HASHES = {"env", "policy", "index", "counter"}
_NO_IDS = (
    "holds no token ids of a student: collect it again with --format and --tokenizer, or build with --rerender,"
    " --format and --tokenizer"
)


@dataclass(frozen=True)
class TeacherRun:
    """An opened run folder: its card and its tasks."""

    folder: Path
    stage: Stage
    config: Config
    index: str
    source: Source
    tasks: dict[str, Task]
    """All tasks of its split, by id."""

    @property
    def golds(self) -> dict[str, Gold | None]:
        return {name: task.gold for name, task in self.tasks.items()}

    @property
    def origin(self) -> Origin:
        return Origin(self.source.name, self.stage.inputs["split"], self.stage.outputs["policy"])

    @property
    def dataset(self) -> str:
        """Absolute path or generator of its tasks."""
        return str(self.source.root or self.stage.inputs["dataset"])

    @property
    def chat(self) -> dict[str, str]:
        """Format and tokenizer of its episodes; each is "" if the run has none."""
        return {name: str(self.stage.outputs.get(name, "")) for name in ("format", "tokenizer")}

    def refuse_stray(self, episode: Episode, *, needs_ids: bool) -> None:
        """Refuse an episode that does not belong to the run; raise UsageError if the episode has another configuration,
        asks another question than the dataset, or lacks token ids."""
        hashes = self.stage.hashes
        if (episode.hashes.env, episode.hashes.counter) != (hashes["env"], hashes["counter"]):
            raise UsageError(f"{self.folder}: episode {episode.episode_id} was collected under another configuration")
        task = self.tasks.get(episode.task.task_id)
        if task is None or task.query != episode.task.query:
            raise UsageError(
                f"{self.folder}: {self.dataset} has no task {episode.task.task_id!r} in split {self.origin.split} that"
                f" asks {episode.task.query!r}: it is not the dataset that the episodes were collected over"
            )
        if needs_ids and episode.status in (Status.COMPLETED, Status.TRUNCATED) and not has_token_ids(episode):
            raise UsageError(f"{self.folder} (episode {episode.episode_id}) {_NO_IDS}")

    def check_round_trip(self, tokenizer: Tokenizer) -> None:
        """Check the tokenizer on the texts of the run's prompts, as `check_round_trip` of `collect` does."""
        check_round_trip(tokenizer, sample_texts(self.source, list(self.tasks.values()), self.config))

    def missing(self, met: Iterable[str]) -> int:
        """Return the number of tasks that lack an episode, given the task of each existing one."""
        found, samples = Counter(met), self.stage.inputs.get("samples", 1)
        return sum(found[task] < samples for task in self.stage.inputs.get("tasks", ()))

    def described(self, met: Sequence[str]) -> CollectionRun:
        """Return the run's entry in a data card, given the task of each of its episodes."""
        return CollectionRun(
            folder=str(self.folder.resolve()),
            dataset=self.dataset,
            name=self.source.name,
            split=self.origin.split,
            share=str(self.stage.outputs.get("share", "")),
            teacher=self.origin.teacher,
            index=self.index,
            hashes=self.stage.hashes,
            episodes=len(met),
            missing=self.missing(met),
            config=msgspec.to_builtins(self.config),
        )


def open_runs(folders: Sequence[Path], *, rerendered: bool, partial: bool = False) -> list[TeacherRun]:
    """Open runs of one environment.

    Args:
        rerendered: contexts will be rendered again, so the runs' students may differ.
        partial: accept unfinished collections.

    Raises:
        UsageError: there are no runs, one is unfinished or over the test split, or their prompts differ.
        SchemaError: a card is damaged.
    """
    if not folders:
        raise UsageError("name at least one run folder, as `harness1 sft collect` writes them")
    runs = [_open_run(folder, partial=partial) for folder in folders]
    for run in runs[1:]:
        _refuse_mixture(runs[0], run, rerendered=rerendered)
    _refuse_namesakes(runs)
    if not rerendered:
        for run in runs:
            if run.stage.hashes["counter"] == ApproximateCounter.hash:
                raise UsageError(f"{run.folder} {_NO_IDS}")
    return runs


def _open_run(folder: Path, *, partial: bool) -> TeacherRun:
    config, index = run_config(folder)
    stage = read_stage(folder)
    assert stage is not None, "run_config has read it"
    if not {"dataset", "split"} <= stage.inputs.keys():
        raise UsageError(f"{folder} is not a collection over a dataset's tasks: make one with `harness1 sft collect`")
    if not stage.hashes.keys() >= _HASHES:
        raise SchemaError(f"{folder / STAGE} lacks hashes of the run: it was edited")
    if str(stage.outputs.get("policy", "")).startswith("corrected:"):
        raise UsageError(
            f"{folder} was collected by `corrected:`, which is no more: its student's turns would be taught"
        )
    split = stage.inputs["split"]
    check_taught_split(split, str(folder))
    if stage.status != "finished" and not partial:
        raise UsageError(
            f"{folder} is not finished: run the same `harness1 sft collect` again, or use it as it is with --partial"
        )
    source = open_source(stage.outputs.get("source", stage.inputs["dataset"]))
    tasks = {task.task_id: task for task in source.tasks(split)}
    if "tasks" in stage.inputs:
        Run(folder, stage, given=list(tasks.values())).refuse_other_gold("collect it again with --force")
    return TeacherRun(folder, stage, config, index, source, tasks)


def _refuse_namesakes(runs: Sequence[TeacherRun]) -> None:
    """Refuse two datasets with one name, because rows and held-out tasks are identified by it."""
    places: dict[str, str] = {}
    for run in runs:
        if places.setdefault(run.source.name, run.dataset) != run.dataset:
            raise UsageError(
                f"{run.folder} is over another dataset named {run.source.name}: rename one, or build two datasets"
            )


def _refuse_mixture(first: TeacherRun, other: TeacherRun, *, rerendered: bool) -> None:
    """Refuse two runs of different environments or for different students."""
    names = ("env",) if rerendered else ("env", "counter")
    if all(first.stage.hashes[name] == other.stage.hashes[name] for name in names):
        return
    one, another = ({"env": msgspec.to_builtins(run.config.env)} | run.chat for run in (first, other))
    what = (
        "; ".join(f"{name}: {a} != {b}" for name, a, b in differences(one, another))
        or "different versions of prompts or tokenizers"
    )
    raise UsageError(
        f"{other.folder} was collected under another configuration than {first.folder}: {what}. Build a dataset of each"
    )
