"""The log of a training run: lines of JSON, and on request TensorBoard and Weights & Biases."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import MissingExtra
from harness1.hashing import text_digest
from harness1.runs.files import write_atomically

LOG = "log.jsonl"
VALIDATION_PREFIX = "held_out/"
"""Prefix of the names of validation metrics, in a log and in the values given to a `StepListener`."""
StepListener = Callable[[int, int, Mapping[str, float]], None]
"""Called with the step, the number of steps and the measured values; first with the last completed step, or 0."""


class TrainLog(AbstractContextManager["TrainLog"]):
    """Appends to `log.jsonl`. A resumed run repeats the steps after `after`, so their old lines are removed.

    Args:
        folder: None for a process that must not write.
        wandb: a project of Weights & Biases; empty for none.

    Raises:
        MissingExtra: TensorBoard or wandb is not installed.
    """

    def __init__(self, folder: Path | None, after: int = 0, *, tensorboard: bool = False, wandb: str = "") -> None:
        self._file: io.FileIO | None = None
        self._events: Any = None
        self._project: Any = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._events = _open_tensorboard(folder / "tensorboard", after) if tensorboard else None
        self._project = _open_wandb(folder, wandb) if wandb else None
        path = folder / LOG
        kept = [line for line in _lines(path) if after > 0 and _step(line) <= after]
        write_atomically(path, b"".join(line + b"\n" for line in kept))
        self._file = io.FileIO(path, "ab")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line with the step and its values."""
        if self._file is None:
            return
        self._file.write(msgspec.json.encode({"step": step, **values}) + b"\n")
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        if self._project is not None:
            self._project.log(dict(values), step=step)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()
        if self._project is not None:
            self._project.finish()


def validation_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the validation metrics among some values, without their prefix."""
    prefix = VALIDATION_PREFIX
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a training run, oldest first, without a torn last one."""
    return [msgspec.json.decode(line) for line in _lines(folder / LOG)]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def _step(line: bytes) -> int:
    step: int = msgspec.json.decode(line)["step"]
    return step


def _open_tensorboard(folder: Path, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise MissingExtra("tensorboard", "logs") from error
    return SummaryWriter(folder, purge_step=after + 1)


def _open_wandb(folder: Path, project: str) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise MissingExtra("wandb", "logs") from error
    # A resumed folder continues its run.
    return wandb.init(project=project, dir=folder, id=text_digest(str(folder.resolve())), resume="allow")
