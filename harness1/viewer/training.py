"""The log of a training as curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import SchemaError
from harness1.train.log import LOG, VALIDATION_PREFIX, read_log


def is_training(folder: Path) -> bool:
    """Whether a training wrote its log into a folder."""
    return (folder / LOG).is_file()


def training_card(folder: Path) -> dict[str, Any]:
    """A training as plain data: of every metric its steps and values; `looks` are those of held-out evaluations, under
    the names of what they measure.

    Raises:
        SchemaError: the log is not readable as one.
    """
    curves: dict[str, list[list[float]]] = {}
    looks: dict[str, list[list[float]]] = {}
    try:
        for line in read_log(folder):
            step = line["step"]
            for name, value in line.items():
                if name == "step" or not isinstance(value, int | float):
                    continue
                kind, key = (
                    (looks, name.removeprefix(VALIDATION_PREFIX))
                    if name.startswith(VALIDATION_PREFIX)
                    else (curves, name)
                )
                steps, values = kind.setdefault(key, [[], []])
                steps.append(step)
                values.append(value)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{folder / LOG} is not the log of a training: {error}") from error
    return {"name": folder.resolve().name, "folder": str(folder), "curves": curves, "looks": looks}
