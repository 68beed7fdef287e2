"""The folder of a recipe: its stages and gates, and the runs and trainings that they made."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import UsageError
from harness1.recipe.run import JOURNAL, RecipeState, StageRecord, is_at_work, read_recipe_state
from harness1.runs.files import STAGE
from harness1.training.log import LOG

PLAY, TRAIN = (("eval",), ("sft", "collect")), (("sft", "train"), ("rl", "train"))
"""The verbs of stages that leave episodes, and of those that leave curves."""


def is_recipe(folder: Path) -> bool:
    """Return True if a folder is that of a recipe."""
    return (folder / JOURNAL).is_file()


def recipe_parts(folder: Path) -> list[Path]:
    """Return the folders of the stages that have begun and have episodes or curves, in order of their stages.

    Raises:
        UsageError: the folder has been removed.
        SchemaError: the journal is damaged.
    """
    return [folder / name for name, record in _journal(folder).stages.items() if _is_of((*PLAY, *TRAIN), record)]


def written_parts(folder: Path) -> list[Path]:
    """Return those parts that have written something, the last one first: what was trained stands beside the rest."""
    stages = _journal(folder).stages
    marks = {folder / name: LOG if _is_of(TRAIN, record) else STAGE for name, record in stages.items()}
    return [part for part in reversed(recipe_parts(folder)) if (part / marks[part]).is_file()]


def recipe_card(folder: Path) -> dict[str, Any]:
    """Return a recipe as JSON data. Times are in seconds; `expected` is 0 where nothing is known.

    Raises:
        UsageError: the folder has been removed.
        SchemaError: the journal is damaged.
    """
    journal, at_work = _journal(folder), is_at_work(folder)
    expected = journal.expected()
    stages = []
    for name in dict.fromkeys([*journal.plan, *journal.stages]):
        card: dict[str, Any] = {"name": name, "folder": str(folder / name), "status": "to come", "findings": []}
        if name in journal.plan:
            card["says"] = journal.plan[name].says
        if record := journal.stages.get(name):
            card |= msgspec.to_builtins({each: getattr(record, each) for each in ("findings", "seconds", "metrics")})
            card["status"] = record.status_now(at_work)
            card["command"] = f"harness1 {shlex.join(record.words)}"
            card["began"], card["exit"] = record.began, record.exit
        stages.append(card | {"expected": expected.get(name, 0.0)})
    return {"name": folder.resolve().name, "folder": str(folder), "title": journal.title, "stages": stages}


def _is_of(verbs: Sequence[tuple[str, ...]], record: StageRecord) -> bool:
    return any(record.words[: len(verb)] == verb for verb in verbs)


def _journal(folder: Path) -> RecipeState:
    journal = read_recipe_state(folder)
    if journal is None:
        raise UsageError(f"{folder} holds no recipe any more")
    return journal
