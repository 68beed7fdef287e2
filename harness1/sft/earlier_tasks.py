"""The tasks that earlier work was made of, read from the cards of its folders, so that they can be left out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from harness1.data.leaks import Selection
from harness1.data.open import open_source
from harness1.errors import SchemaError, UsageError
from harness1.runs.files import STAGE, Stage, read_stage
from harness1.runs.journal import read_episodes
from harness1.sft.data_card import CARD, read_card

LearnedTask = tuple[str, str]
"""The name of a dataset, and the id of a task in it."""


def tasks_of_runs(folders: Iterable[str | Path]) -> frozenset[LearnedTask]:
    """Return the tasks of earlier work.

    Args:
        folders: runs of `eval` or `sft collect` (their tasks), datasets of `sft build` and checkpoints of `sft train`
            (the tasks of their rows), trainings of `rl train` (all tasks that they could draw, and those that they
            validated on), profiles of `rl pivots` (the tasks that they chose from their run), and the episodes of a
            training (the tasks that were played).

    Raises:
        UsageError: a folder is none of these, or its card lists no tasks.
        SchemaError: a card is damaged.
    """
    return frozenset(task for folder in folders for task in _tasks_of(Path(folder)))


def _tasks_of(folder: Path) -> Iterable[LearnedTask]:
    for card in (CARD, f"data_{CARD}"):
        if (folder / card).is_file():
            return _of_dataset(folder, card)
    stage = read_stage(folder)
    try:
        if stage is not None and "selections" in stage.outputs:
            return _of_training(stage)
        if stage is not None and stage.verb == "run":
            return _of_run(folder, stage)
    except (KeyError, msgspec.ValidationError) as error:
        raise SchemaError(f"{folder / STAGE} does not say which tasks it was made of: {error!r}") from error
    raise UsageError(
        f"--exclude {folder}: no card there says which tasks it was made of; give a run, a dataset of `harness1 sft"
        " build`, a checkpoint or a profile"
    )


def _of_dataset(folder: Path, card: str) -> list[LearnedTask]:
    listed = read_card(folder, card).tasks
    if not listed:
        raise UsageError(f"--exclude {folder}: {card} lists no tasks, as those of earlier versions: build it again")
    return [(dataset, task) for dataset, tasks in listed.items() for task in tasks]


def _of_training(stage: Stage) -> list[LearnedTask]:
    chosen = msgspec.convert(stage.outputs["selections"], list[Selection])
    return [(each.dataset, task) for each in chosen for task in (*each.learned, *each.held_out)]


def _of_run(folder: Path, stage: Stage) -> list[LearnedTask]:
    """Return the tasks that a run was asked to play, or, of a training's episodes, those that were played. Where a
    training mixed datasets, its episodes do not say which one a task is of, and it counts for each."""
    if "tasks" in stage.inputs:
        dataset = stage.outputs.get("source", stage.inputs["dataset"])
        name = open_source(dataset).name
        return [(name, task) for task in msgspec.convert(stage.inputs["tasks"], list[str])]
    names = [open_source(dataset).name for dataset in stage.outputs["datasets"]]
    played = {episode.task.task_id for episode in read_episodes(folder)}
    return [(name, task) for name in names for task in sorted(played)]
