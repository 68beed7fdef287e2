"""The log of a training run as curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness1.runs.files import read_stage
from harness1.training.log import LOG, VALIDATION_PREFIX, read_log


def is_training(folder: Path) -> bool:
    """Return True if a folder has the log of a training run."""
    return (folder / LOG).is_file()


def training_row(folder: Path) -> dict[str, str]:
    """Return what the page knows of a training before its curves are asked for."""
    return {"name": folder.resolve().name, "folder": str(folder)}


def training_card(folder: Path) -> dict[str, Any]:
    """Return a training as JSON data: steps and values of the training metrics in `curves`, and of the validation
    metrics in `validation`. The log is as for `read_log`. With the hashes of its indexes and of its reward, runs of the
    same can stand beside it."""
    curves: dict[str, list[list[float]]] = {}
    validation: dict[str, list[list[float]]] = {}
    for line in read_log(folder):
        step = line.pop("step")
        for name, value in line.items():
            if isinstance(value, int | float):
                kind = validation if name.startswith(VALIDATION_PREFIX) else curves
                steps, values = kind.setdefault(name.removeprefix(VALIDATION_PREFIX), [[], []])
                steps.append(step)
                values.append(value)
    stage = read_stage(folder)
    inputs = {} if stage is None else stage.inputs
    made_with = {"indexes": inputs.get("indexes", []), "reward": inputs.get("reward", "")}
    return {**training_row(folder), **made_with, "curves": curves, "validation": validation}
