"""Run folders as what a dataset is made of: opened, and kept apart where they do not go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness1.config import Config
from harness1.data.source import Source, open_source
from harness1.env.pieces import ApproximateCounter
from harness1.errors import UsageError
from harness1.policy.checkpoint import differences
from harness1.records import Episode, Gold, Status
from harness1.run_folder import run_config
from harness1.sft.data_card import CollectionRun
from harness1.sft.sft_rows import Origin, has_token_ids
from harness1.stage import Stage, read_stage

_NO_IDS = (
    "holds no token ids of a student: collect it again with --format and --tokenizer, or build with --rerender,"
    " --format and --tokenizer"
)


@dataclass(frozen=True)
class TeacherRun:
    """An opened run folder: its card, and the tasks that its episodes are about."""

    folder: Path
    stage: Stage
    config: Config
    index: str
    source: Source
    golds: dict[str, Gold | None]

    @property
    def origin(self) -> Origin:
        return Origin(self.source.name, self.stage.inputs["split"], self.stage.outputs["policy"])

    @property
    def spoken(self) -> dict[str, str]:
        """The format of its episodes and where their tokenizer lies; empty where a run has none."""
        return {name: str(self.stage.outputs.get(name, "")) for name in ("format", "tokenizer")}

    def refuse_stray(self, episode: Episode, *, needs_ids: bool) -> None:
        """
        Raises:
            UsageError: an episode was not made as its run says, or lacks the tokens that its rows are made of.
        """
        hashes = self.stage.hashes
        if (episode.hashes.env, episode.hashes.counter) != (hashes["env"], hashes["counter"]):
            raise UsageError(f"{self.folder}: episode {episode.episode_id} was collected under another configuration")
        if needs_ids and episode.status in (Status.COMPLETED, Status.TRUNCATED) and not has_token_ids(episode):
            raise UsageError(f"{self.folder} (episode {episode.episode_id}) {_NO_IDS}")

    def described(self, episodes: int) -> CollectionRun:
        """The run as a data card tells of it, with the number of its episodes that were looked at."""
        return CollectionRun(
            folder=str(self.folder.resolve()),
            dataset=self.stage.inputs["dataset"],
            name=self.source.name,
            split=self.origin.split,
            teacher=self.origin.teacher,
            index=self.index,
            hashes=self.stage.hashes,
            episodes=episodes,
            config=msgspec.to_builtins(self.config),
        )


def open_runs(folders: Sequence[Path], *, rerendered: bool) -> list[TeacherRun]:
    """The runs, which were made in one environment.

    Args:
        rerendered: their contexts will be rendered again, so that it does not matter for which student.

    Raises:
        UsageError: there is none, or they differ in what decides a prompt.
        SchemaError: a card is damaged.
    """
    if not folders:
        raise UsageError("name at least one run folder, as `harness1 sft collect` writes them")
    runs = [_open_run(folder) for folder in folders]
    for run in runs[1:]:
        _refuse_mixture(runs[0], run, rerendered=rerendered)
    if not rerendered:
        for run in runs:
            if run.stage.hashes["counter"] == ApproximateCounter.hash:
                raise UsageError(f"{run.folder} {_NO_IDS}")
    return runs


def _open_run(folder: Path) -> TeacherRun:
    config, index = run_config(folder)
    stage = read_stage(folder)
    assert stage is not None, "run_config has read it"
    if not {"dataset", "split"} <= stage.inputs.keys():
        raise UsageError(f"{folder} is no collection over the tasks of a dataset: make one with `harness1 sft collect`")
    source = open_source(stage.inputs["dataset"])
    golds = {task.task_id: task.gold for task in source.tasks(stage.inputs["split"])}
    return TeacherRun(folder, stage, config, index, source, golds)


def _refuse_mixture(first: TeacherRun, other: TeacherRun, *, rerendered: bool) -> None:
    """
    Raises:
        UsageError: two runs were made in different environments, or for different students.
    """
    names = ("env",) if rerendered else ("env", "counter")
    if all(first.stage.hashes[name] == other.stage.hashes[name] for name in names):
        return
    one, another = ({"env": msgspec.to_builtins(run.config.env)} | run.spoken for run in (first, other))
    what = (
        "; ".join(f"{name}: {a} != {b}" for name, a, b in differences(one, another))
        or "prompts or tokenizers of different editions"
    )
    raise UsageError(
        f"{other.folder} was collected under another configuration than {first.folder}: {what}. Build a dataset of each"
    )
